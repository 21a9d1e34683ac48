// The device on which kernels of emulated kernel libraries run: one in a process.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "machine.h"

namespace emulator {

class CudaDevice {
 public:
  // Shared memory of a block, bytes: an A100's, and an H200's for kernels of sm_90.
  static constexpr int kMostShared = 163 * 1024, kMostSharedSm90 = 227 * 1024;
  static constexpr int kReserved = 1024;     // bytes that a block takes beside its own
  static constexpr int kMostThreads = 2048;  // of a multiprocessor

  // Streams belong to whoever emulates the driver. It runs a body when all that was put on the
  // stream before is done, and again whenever a graph that captured it is replayed; in the end it
  // releases the argument. It is told of the first error.
  using RunOnStream = void(void* stream, void (*body)(void*), void* argument,
                           void (*release)(void*));
  using FailDevice = void(const char* text);

  static CudaDevice& instance();

  // Without streams (null) a launch returns when the kernel is done.
  void attach(RunOnStream* run, FailDevice* fail);

  // Puts a kernel on a stream. Returns false if the device has failed.
  bool launch(void* stream, const std::shared_ptr<const Module>& module, const std::string& kernel,
              Launch request);
  // The same for bytes that are to be set to a value.
  bool fill(void* stream, void* memory, int value, std::size_t bytes);

  void fail(const std::string& text);          // only the first text is kept
  std::string error();                         // empty: none
  void clear();                                // the error, the counters, and launches so far
  std::map<std::string, Counters> counters();  // by kernel

  Machine machine;
  int multiprocessors = 8;
  int resident = 8;  // blocks of a launch that run at a time
  std::uint64_t seed = 0;
  std::uint64_t max_statements = 100'000'000'000;  // kernels that wait end by their own timeouts

 private:
  // Puts work on a stream; what it throws is the device's error. Returns false if that has failed.
  bool enqueue(void* stream, std::function<void()> work);

  RunOnStream* run_ = nullptr;
  FailDevice* fail_ = nullptr;
  std::atomic<std::uint64_t> launches_{0};
  std::mutex reporting_;
  std::string error_;
  std::map<std::string, Counters> counters_;
};

}  // namespace emulator
