// A POSIX shared memory segment mapped into this process.
//
// Segments are created by Python's multiprocessing.shared_memory, whose resource tracker removes
// them should the process die. They are *attached* here because, before Python 3.13, attaching
// through the standard library registers a second owner, which would remove the segment on exit.
#pragma once

#include <cstddef>
#include <string>

namespace flux::host {

class SharedMapping {
 public:
  // Maps an existing segment; throws std::system_error.
  SharedMapping(const std::string& name, std::size_t bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  char* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* address_ = nullptr;
  std::size_t bytes_ = 0;
};

// Reserves all pages of a segment, so that a full /dev/shm is an error here (ENOSPC) instead of a
// SIGBUS at some later store. Throws std::system_error.
void reserve_shared(const std::string& name, std::size_t bytes);

}  // namespace flux::host
