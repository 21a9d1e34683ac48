// The device on which kernels of emulated kernel libraries run: one in a process.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "gpu/ordering.h"
#include "machine.h"

namespace ptx_machine {

class CudaDevice {
 public:
  // Streams belong to whoever emulates the driver. It runs a body when all that was put on the
  // stream before is done, and again whenever a graph that captured it is replayed; in the end it
  // releases the argument. It is told of the first error.
  using RunOnStream = void(void* stream, void (*body)(void*), void* argument,
                           void (*release)(void*));
  using FailDevice = void(const char* text);
  struct Streams {
    RunOnStream* run = nullptr;
    int (*create)(void** stream, unsigned flags, int priority) = nullptr;
    int (*destroy)(void* stream) = nullptr;
    int (*synchronize)(void* stream) = nullptr;
  };
  // Programmatic dependent launch: of the body that the calling thread runs. An `early` one may start
  // when the body before it has released it; predecessor_ended tells whether that has ended.
  using ReleaseNext = void();
  using PredecessorEnded = int();
  using YieldTurn = int();

  // Kernels of libraries wait for other threads of the host too, and end by their own timeouts.
  static constexpr double kPatience = 20;  // seconds

  struct Copy {
    void* to;
    bool to_device;  // or to memory of the host
    const void* from;
    bool from_device;
    std::size_t bytes;
  };

  // What all launches of a kernel did.
  struct Record {
    std::shared_ptr<const Module> module;
    std::string kernel;
    std::uint64_t launches = 0;
    std::uint64_t nanoseconds = 0;  // of the host's cores
    Counters counters;
  };

  static CudaDevice& instance();

  // Without streams a launch returns when the kernel is done.
  void attach(const Streams& streams, FailDevice* fail);
  const Streams& streams() const { return streams_; }
  // With a function that gives up the turn of the calling thread's stream, if streams take turns.
  void attach_turns(YieldTurn* yield_turn) { yield_turn_ = yield_turn; }
  void attach_early(RunOnStream* run_early, ReleaseNext* release_next,
                    PredecessorEnded* predecessor_ended);

  // Puts a kernel on a stream. Returns false if the device has failed.
  bool launch(void* stream, const std::shared_ptr<const Module>& module, const std::string& kernel,
              Launch request, bool early);
  // The same for numbers of `size` bytes, 1 or 4, that are set to a value; for a copy; for the time then.
  bool fill(void* stream, void* memory, std::uint32_t value, int size, std::size_t count);
  bool copy(void* stream, const Copy& what);
  bool record(void* stream, std::uint64_t* nanoseconds);
  // Waits for all that kernels' libraries have put on a stream. Returns false if the device has failed.
  bool finish(void* stream);
  bool finish();  // on any stream
  void forget_stream(void* stream);

  // What the emulated GPU tells of its streams.
  static const emulated::Ordering* ordering();

  // Memory that kernels may access from now on, or no more; the name is for messages. A multicast
  // address stands for the same offset of all members.
  static void add_memory(void* memory, std::size_t bytes, const char* name);
  static void remove_memory(void* memory);
  static void add_multicast(void* memory, std::size_t bytes, const std::uint64_t* members,
                            int count);

  // Changes the PTX of libraries that are loaded from now on: for tests that seed bugs.
  std::function<std::string(const std::string&)> edit;

  void fail(const std::string& text);  // only the first text is kept
  std::string error();                 // empty: none
  void clear();                        // the error, the counters, and launches so far
  std::vector<Record> counters();      // of each kernel that was launched

  Machine machine;
  std::uint64_t seed = 0;
  bool races = true;             // whether races are looked for
  bool copy_races = false;       // and races of copies that streams make
  bool peer_reductions = false;  // bulk reductions are atomic among devices, as over NVLink
  Vectors vectors = Vectors::kApart;
  double unload_patience = 5;  // seconds for which unloading a library waits for kernels that run
  std::uint32_t device = 0;    // of launches from now on: those of one device are in the scope .gpu
  std::uint64_t max_statements = 100'000'000'000;  // kernels that wait end by their own timeouts

 private:
  CudaDevice() { machine.room().patience = kPatience; }
  // Puts work on a stream; what it throws is the device's error. Returns false if that has failed.
  bool enqueue(void* stream, std::function<void()> work, bool early = false);

  Streams streams_;
  FailDevice* fail_ = nullptr;
  RunOnStream* run_early_ = nullptr;
  ReleaseNext* release_next_ = nullptr;
  PredecessorEnded* predecessor_ended_ = nullptr;
  YieldTurn* yield_turn_ = nullptr;
  std::atomic<std::uint64_t> launches_{0};
  std::atomic<bool> has_failed_{false};  // kernels that run end
  std::mutex reporting_;
  std::string error_;
  std::set<void*> used_;  // streams that have got work
  // By name, lines of the module, and statements: a library that is loaded again has a new module.
  std::map<std::tuple<std::string, std::size_t, std::size_t>, Record> counters_;
};

}  // namespace ptx_machine
