// The few entry points of the CUDA driver that move tiles and signals, looked up at run time: this
// links and loads on machines without a driver, and needs no CUDA headers.
//
// A memory operation on a stream is ordered after all earlier work of the stream, and writes of that
// work are visible to the system before it (the driver's default, without
// CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER). So "copy, then signal" on one stream is what
// cuda/sync.cuh requires of a raise.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_host/shared_library.h"

namespace flux::host {

using Stream = std::uintptr_t;  // CUstream
using Event = std::uintptr_t;   // CUevent
using Address = std::uintptr_t;
inline constexpr Address kWord = sizeof(std::uint32_t);  // bytes of a signal

// A 32-bit word of memory to be written, or to be waited for, as flux::epoch_reached compares.
struct MemOp {
  enum Kind { kWait, kWrite } kind;
  Address word;
  std::uint32_t value;
};

class Calls;

class Driver {
 public:
  // Throws std::runtime_error if the library does not exist or lacks an entry point.
  explicit Driver(const std::string& library);

  // All but the noexcept ones throw std::runtime_error with the driver's message if a driver call
  // fails. Destructors call those. After a fault of the device every call fails, also the release of
  // a handle: an exception there would end the process and hide the message about the fault.
  // A stream of the current context, of the highest priority: tiles must not queue behind kernels.
  Stream create_stream();
  void destroy_stream(Stream stream) noexcept;
  // A stream on which no wait is put, for operations that must run while other streams wait. All
  // ops share it. It is created before any of them waits: streams share hardware queues, and a new
  // stream may be behind a stream that waits. It lives as long as a caller holds it.
  std::shared_ptr<const Stream> rescue_stream();
  void synchronize(Stream stream);
  // Whether all work of the stream is done.
  bool ready(Stream stream);
  // Later work on `later` runs after the work that is on `earlier` now.
  void order_after(Stream later, Stream earlier);
  // The same in two steps, with an event that is kept.
  Event create_event();
  // An event that records the time at which it passes.
  Event create_timed_event();
  // Time between two timed events that have passed, in ns. The driver's unit is half a microsecond
  // or less.
  double elapsed_ns(Event begin, Event end);
  void destroy_event(Event event) noexcept;
  void record(Event event, Stream stream);
  void await_event(Stream stream, Event event);
  // Whether the work before the last record of an event is done, or the event was never recorded.
  bool passed(Event event);
  void copy(Stream stream, Address to, Address from, std::size_t bytes);
  // `rows` pieces of so many bytes. Steps are the bytes from one piece to the next.
  void copy_rows(Stream stream, Address to, std::size_t to_step, Address from,
                 std::size_t from_step, std::size_t bytes, std::size_t rows);
  void signal(Stream stream, Address word, std::uint32_t value);
  // Holds the stream until the word has reached `value`, as flux::epoch_reached compares.
  void await_signal(Stream stream, Address word, std::uint32_t value);
  // Several waits and writes, in this order, batched into as few driver calls as possible.
  void memory_ops(Stream stream, const std::vector<MemOp>& ops);
  void fill(Stream stream, Address words, std::uint32_t value, std::size_t count);
  // Whether a device does atomic operations on the memory of another one natively, both numbered as
  // cuDeviceGet does. NVLink can; over PCIe they are lost, or a fault.
  bool peer_atomics(int device, int peer) const;
  // The unique number of the capture that a stream takes part in; 0: none.
  std::uint64_t capture(Stream stream);

  std::map<int, std::weak_ptr<Calls>> calls;  // by lane (calls.h)

 private:
  struct Entries;
  void check(int result, const char* what) const;

  SharedLibrary library_;
  std::shared_ptr<Entries> entries_;
  std::weak_ptr<const Stream> rescue_;
};

}  // namespace flux::host
