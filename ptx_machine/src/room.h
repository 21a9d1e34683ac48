// Which blocks run on which multiprocessor. All kernels of a machine share its multiprocessors: a block
// waits until one of them has room for it.
//
// Blocks are placed as a GPU places them: those of the kernel that was launched first come first, and a
// later kernel's only when none of an earlier one waits for room; each on the multiprocessor with the
// fewest blocks that has room. So kernels that wait for each other may keep each other from running.
// NVIDIA does not document the order. This one is what measurements of others agree on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "resources.h"

namespace ptx_machine {

// A kernel from its launch to its end. Its fields belong to Room.
struct Tenant {
  std::string kernel;
  Footprint block;
  std::uint64_t size = 1;                  // blocks of a cluster
  std::uint64_t waiting = 0;               // clusters without room
  std::vector<int> places;                 // multiprocessors of the blocks that have room
  std::atomic<std::uint64_t> progress{0};  // statements that change something others can see
  std::atomic<bool> is_idle{false};        // its threads wait, or poll what does not change
  std::atomic<bool> is_asked{false};       // for what its threads do
  std::string answer;
  std::string failure;  // why it has to end
  std::atomic<bool> has_failed{false};
};

class Room {
 public:
  // Throws PtxError if kernels run.
  void configure(const DeviceModel& model, int multiprocessors);
  const DeviceModel& model() const { return *model_; }
  int multiprocessors() const { return static_cast<int>(each_.size()); }
  // How many clusters of `size` such blocks an empty device holds.
  int clusters_that_fit(const Footprint& block, std::uint64_t size) const;

  // Lets a kernel stand in line for `clusters`. Throws PtxError if one never has room.
  void enter(Tenant& tenant, std::uint64_t clusters);
  // Takes it out of the line, with the blocks that it still has.
  void leave(Tenant& tenant);

  // Returns a multiprocessor for each block of a cluster, or nothing if there is no room, or not yet.
  std::optional<std::vector<int>> place(Tenant& tenant, std::mt19937_64* random);
  void release(Tenant& tenant, int multiprocessor);
  // Waits until no kernel runs. Returns one that still does after so many seconds, or nothing.
  std::string await_none(double seconds);
  // How many blocks of all kernels have room now.
  std::uint64_t running();

  // Sleeps until there may be room. Throws PtxError when no kernel gets on.
  void wait(Tenant& tenant);
  // Throws PtxError when blocks of the tenant wait for room or the tenant is idle, and no kernel gets on,
  // or when that was found for another kernel. A kernel that runs calls it now and then. `standing` tells where its threads are.
  void check(Tenant& tenant, const std::function<std::string()>& standing);

  // How long kernels with room may change nothing while others wait, in seconds.
  double patience = 10;
  // How long all kernels may be idle, in seconds; 0: waits end by timeouts of their own.
  double idle_patience = 0;

 private:
  using Clock = std::chrono::steady_clock;
  struct Multiprocessor {
    std::uint64_t blocks = 0;
    Footprint used;
  };

  bool fits(const Multiprocessor& one, const Footprint& block) const;
  std::uint64_t capacity(const Multiprocessor& one, const Footprint& block) const;
  std::vector<int> place_in(int first, int count, const Tenant& tenant, std::mt19937_64* random);
  void give_back(const Tenant& tenant, int multiprocessor);
  bool is_stuck(Clock::time_point now);
  void report(std::unique_lock<std::mutex>& lock, Tenant& by);

  const DeviceModel* model_ = &model_named("H200");
  std::vector<int> groups_ = {8};
  std::vector<Multiprocessor> each_ = std::vector<Multiprocessor>(8);
  std::mutex mutex_;  // guards all of it, and tenants
  std::condition_variable changed_;
  std::list<Tenant*> tenants_;  // in the order of launches
  std::uint64_t events_ = 0;    // blocks that came and went
  bool is_reporting_ = false;
  std::uint64_t seen_ = 0;  // events and progress, when something was last seen to change
  Clock::time_point since_ = Clock::now();
};

}  // namespace ptx_machine
