// The processes of a group's ranks on this host, watched through pidfds. A descriptor refers to one
// process, even after its pid has been reused. If the kernel provides no pidfd (before Linux 5.3,
// or under a sandbox that forbids the call), the process is not watched and never counts as ended.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <vector>

namespace flux::host {

class Processes {
 public:
  // By rank; 0 for a rank that is not watched, such as this rank and ranks on other hosts.
  explicit Processes(std::vector<pid_t> pids);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Whether the rank's process is watched and has ended. A stopped process has not ended.
  bool ended(int rank);
  // Closes the descriptors. After that, no process is watched. May be called from any thread.
  // Idempotent.
  void close();
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  const std::vector<pid_t> pids_;
  std::mutex mutex_;              // close() and ended() may run in different threads
  std::vector<int> descriptors_;  // by rank; negative where there is none
};

}  // namespace flux::host
