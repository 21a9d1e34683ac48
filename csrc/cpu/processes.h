// The processes of a group's ranks on this host, watched through pidfds: a descriptor stands for one
// process, whatever becomes of its number. Where the kernel gives none (before Linux 5.3, or under a
// sandbox that forbids the call), a process is not watched and never counts as ended.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <vector>

namespace flux::host {

class Processes {
 public:
  // By rank; 0 for one that is not to be watched, such as this rank and those on other hosts.
  explicit Processes(std::vector<pid_t> pids);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Whether the rank's process is watched and has ended. A stopped process has not.
  bool ended(int rank);
  // Closes the descriptors; no process is watched any more. From any thread, idempotent.
  void close();
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  const std::vector<pid_t> pids_;
  std::mutex mutex_;              // close() against ended() in another thread
  std::vector<int> descriptors_;  // by rank; negative where there is none
};

}  // namespace flux::host
