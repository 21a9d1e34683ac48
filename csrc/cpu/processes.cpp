#include "cpu/processes.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // for C libraries that lack it; the same number on all architectures
#endif

namespace flux::host {

namespace {
constexpr int kUnwatched = -1;
constexpr int kGone = -2;  // ended before it could be watched

int open_process(pid_t pid) {
  if (pid <= 0) return kUnwatched;
  const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (descriptor >= 0) return descriptor;
  return errno == ESRCH ? kGone : kUnwatched;  // other errors: a kernel before 5.3, a sandbox
}
}  // namespace

Processes::Processes(std::vector<pid_t> pids) : pids_(std::move(pids)) {
  for (const pid_t pid : pids_) descriptors_.push_back(open_process(pid));
}

Processes::~Processes() { close(); }

bool Processes::ended(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto index = static_cast<std::size_t>(rank);
  if (index >= descriptors_.size() || descriptors_[index] == kUnwatched) return false;
  if (descriptors_[index] == kGone) return true;
  pollfd watched{descriptors_[index], POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

void Processes::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) ::close(descriptor);
  }
  descriptors_.clear();
}

}  // namespace flux::host
