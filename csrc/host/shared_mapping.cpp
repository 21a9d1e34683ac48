#include "host/shared_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace flux::host {
namespace {

class Descriptor {
 public:
  explicit Descriptor(const std::string& name) : fd_(shm_open(("/" + name).c_str(), O_RDWR, 0)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "shm_open " + name);
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

SharedMapping::SharedMapping(const std::string& name, std::size_t bytes) : bytes_(bytes) {
  const Descriptor fd(name);
  // A page beyond the end of the segment would be a SIGBUS at its first use.
  struct stat found{};
  if (fstat(fd.get(), &found) != 0) {
    throw std::system_error(errno, std::generic_category(), "fstat " + name);
  }
  if (found.st_uid != geteuid()) {
    throw std::system_error(EPERM, std::generic_category(),
                            name + " belongs to user " + std::to_string(found.st_uid));
  }
  if (static_cast<std::uint64_t>(found.st_size) < bytes) {
    throw std::system_error(
        EINVAL, std::generic_category(),
        name + " has " + std::to_string(found.st_size) + " bytes of " + std::to_string(bytes));
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap " + name);
  address_ = static_cast<char*>(at);
}

SharedMapping::~SharedMapping() { munmap(address_, bytes_); }

void reserve_shared(const std::string& name, std::size_t bytes) {
  const Descriptor fd(name);
#if defined(__linux__)
  const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) throw std::system_error(error, std::generic_category(), "reserve " + name);
#else
  (void)bytes;
#endif
}

}  // namespace flux::host
