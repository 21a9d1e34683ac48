#include "cpu/shared_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace flux::host {

SharedMapping::SharedMapping(int descriptor, std::size_t bytes) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  address_ = static_cast<char*>(at);
}

SharedMapping::~SharedMapping() { munmap(address_, bytes_); }

}  // namespace flux::host
