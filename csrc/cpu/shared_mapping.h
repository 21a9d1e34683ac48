// Shared memory mapped into this process. Python creates and checks the memory
// (flux/transport/shm.py). It is mapped here because Python's mmap module keeps one descriptor open
// per mapping.
#pragma once

#include <cstddef>

namespace flux::host {

class SharedMapping {
 public:
  // Maps the first `bytes` of an open file, which may be closed afterwards; throws std::system_error.
  SharedMapping(int descriptor, std::size_t bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  char* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* address_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace flux::host
