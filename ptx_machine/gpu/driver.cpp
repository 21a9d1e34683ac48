// A GPU for tests: the entry points of the CUDA driver. Streams run at the same time
// and in any interleaving, memory is the process's own, and every copy and kernel tile can be delayed at
// random. Rules of real GPUs are enforced: device.h has streams, queues and multiprocessors,
// kernels come from libraries.
#include <cstring>

#include "batch_op.h"
#include "device.h"

namespace {

using namespace emulated;

constexpr unsigned kMostOps = 255;  // cuda.h: the count "must be less than 256"
constexpr const char* kForeign = "a stream waits for a word of another device";
constexpr int kNotReady = 600;
constexpr int kInvalidDevice = 101;
constexpr int kNativeAtomics = 3;  // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

thread_local std::string refusal;  // why the last call was refused

int refuse(const std::string& why) {
  refusal = why;
  return kRefused;
}

std::string number(const char* name, std::uint64_t value) {
  return std::string(name) + "=" + std::to_string(value);
}

void log_call(const char* name, void* stream, const std::string& details = "") {
  device().log_call(name, stream_of(stream)->handle(), details);
}

// A copy or a fill. If it is made by a multiprocessor, it is a kernel of one block.
void put_transfer(const char* what, void* stream, bool needs_room, std::function<void()> run) {
  Item made = item(what, std::move(run));
  made.kind = Item::kCopy;
  made.leaves_at_start = true;
  if (needs_room) {
    Work work;
    work.name = what;
    work.open = [](int, std::vector<Wait>*) {};
    work.close = [body = made.run](int, const std::vector<bool>&, Place) { body(); };
    made.run = [shared = std::make_shared<const Work>(std::move(work)), stream] {
      Grid grid(shared, stream_of(stream)->handle(), stream_of(stream)->gpu());
      device().start(&grid);
      for (Naps naps; !grid.over();) naps.next_unless(grid.step());
      device().end(&grid);
    };
  }
  stream_of(stream)->put(std::move(made));
}

void await_word(std::uintptr_t word, std::uint32_t value) {
  const auto* at = reinterpret_cast<std::uint32_t*>(word);
  std::uint32_t seen = load(at);
  for (Naps naps; !reached(seen, value) && !device().failed(); seen = load(at)) naps.next();
  if (const Ordering* const tell = ordering; tell != nullptr) tell->sees(word, seen);
}

void write_word(std::uintptr_t word, std::uint32_t value) {
  const Ordering* const tell = ordering;
  if (tell != nullptr) return tell->writes(word, value);
  store(reinterpret_cast<std::uint32_t*>(word), value);
}

constexpr int kUnified = 4;  // CU_MEMORYTYPE_UNIFIED

// Where the pieces of a copy are.
struct Pieces {
  std::uintptr_t at;
  std::size_t step;
};

void copy_piece(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  if (is_unmapped(to, bytes) || is_unmapped(from, bytes)) {
    return device().fail("use after free: a copy of " + std::to_string(bytes) +
                         " bytes touches addresses at which nothing is mapped");
  }
  // Copy engines write aligned words whole: flags that are copied may be polled meanwhile.
  const bool words = to % 4 == 0 && bytes % 4 == 0;
  device().land_what_is_due();
  observed(to, from, bytes, words,
           [=] { emulated::write(to, reinterpret_cast<const void*>(from), bytes); });
}

int put_copy(Pieces to, Pieces from, std::size_t bytes, std::size_t rows, void* stream) {
  if (device().copies_refused) return refuse("emulated failure");
  if (!device().first_use("copy", to.at)) return kLaunchFailure;
  std::string what =
      number("bytes", bytes * rows) + ";" + number("to", to.at) + ";" + number("from", from.at);
  if (rows > 1) what.append(";").append(number("rows", rows));
  log_call("copy", stream, what);
  const bool inside = device().is_own(to.at) && device().is_own(from.at);
  put_transfer("copy", stream, device().copies_need_room && inside, [=] {
    dawdle();
    std::this_thread::sleep_for(std::chrono::microseconds(device().copy_us));
    for (std::size_t row = 0; row < rows; ++row) {
      copy_piece(to.at + row * to.step, from.at + row * from.step, bytes);
    }
  });
  return 0;
}

}  // namespace

extern "C" {

// -- for tests -------------------------------------------------------------------------------------

// Runs a function of the host on a stream.
void emulator_put(void* stream, void (*body)()) {
  Item made = item("host", body);
  made.leaves_at_start = true;
  stream_of(stream)->put(std::move(made));
}
// Runs it as often as a graph that captured it is replayed; `release` gets the argument in the end.
void emulator_run(void* stream, void (*body)(void*), void* argument, void (*release)(void*)) {
  Item made =
      item("run", [body, held = std::shared_ptr<void>(argument, release)] { body(held.get()); });
  made.leaves_at_start = true;
  stream_of(stream)->put(std::move(made));
}
// The same, but it may start when the body before it on the stream has called emulator_release_next.
void emulator_run_early(void* stream, void (*body)(void*), void* argument, void (*release)(void*)) {
  Item made =
      item("run", [body, held = std::shared_ptr<void>(argument, release)] { body(held.get()); });
  made.leaves_at_start = made.early = true;
  stream_of(stream)->put(std::move(made));
}
void emulator_release_next() { release_next(); }
int emulator_predecessor_ended() { return predecessor_ended() ? 1 : 0; }
// Streams take turns, which this seed decides; zero: they run at the same time.
void emulator_take_turns(std::uint64_t seed) { turns().take(seed); }
int emulator_yield_turn() { return turns().yield() ? 1 : 0; }
std::uint64_t emulator_turns_digest() { return turns().digest(); }
// Tells a machine from now on what streams order, until emulator_reset.
void emulator_attach_ordering(const Ordering* tell) { ordering = tell; }
void emulator_dawdle() { dawdle(); }
void emulator_fail(const char* text) { device().fail(text); }
void emulator_reset() { device().reset(); }
void emulator_set_delay(int us) { device().delay_us = us; }
void emulator_set_copy_delay(int us) { device().copy_us = us; }
void emulator_set_launch_delay(int us) { device().launch_us = us; }
int emulator_streams() { return device().streams_alive; }
int emulator_timed_events() { return device().timed_events; }
void emulator_refuse_copies(int yes) { device().copies_refused = yes != 0; }
void emulator_refuse_launches(int yes) { device().launches_refused = yes != 0; }
void emulator_limit_room(int yes) { device().limits_room = yes != 0; }
void emulator_load_lazily(int yes) { device().loads_lazily = yes != 0; }
void emulator_copies_need_room(int yes) { device().copies_need_room = yes != 0; }
void emulator_peer_atomics(int yes) { device().peer_atomics = yes != 0; }
void emulator_kernels_first(int yes) { device().kernels_first = yes != 0; }
void emulator_starving_after(int ms) { device().starving_ms = ms; }
void emulator_loading_after(int ms) { device().loading_ms = ms; }
void emulator_full_after(int ms) { device().full_ms = ms; }
void emulator_set_places(int count) { device().places = count; }
void emulator_set_queues(int count) { device().set_queues(count); }
void emulator_host_memory(std::uintptr_t base, std::size_t bytes) {
  device().add_host_memory({base, bytes});
}
void emulator_forbid_waits(std::uintptr_t base, std::size_t bytes) {
  device().forbid_waits({base, bytes});
}
// The GPU that streams are made on from now on, by this thread.
void emulator_use_gpu(int gpu) { current_gpu() = gpu % kGpus; }
void emulator_gpu_memory(std::uintptr_t base, std::size_t bytes, int gpu) {
  device().add_gpu_memory({base, bytes}, gpu);
}
void emulator_write_late(int us) { device().late_us = us; }
int emulator_resident() { return device().resident() ? 1 : 0; }
int emulator_load_module(const char* name) { return device().load_module(name) ? 0 : 1; }
void emulator_record(int yes) { device().record(yes != 0); }

// Texts are the caller's, until the next one of the same thread.
const char* emulator_text(const char* what) {
  thread_local std::string text;
  const std::string name = what;
  text = name == "error"     ? device().error()
         : name == "starved" ? device().starved()
         : name == "calls"   ? device().calls()
                             : device().timeline();
  return text.c_str();
}
void emulator_clear_error() { device().clear_error(); }

// -- the driver ------------------------------------------------------------------------------------

int cuGetErrorString(int error, const char** text) {
  thread_local std::string said;
  said = error == kLaunchFailure ? device().error() : error == kRefused ? refusal : "refused";
  *text = said.c_str();
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetP2PAttribute(int* value, int attribute, int from, int to) {
  if (from == to) return kInvalidDevice;
  if (attribute != kNativeAtomics) return kNotSupported;
  *value = device().peer_atomics;
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new Stream(false);
  log_call("stream_create", *stream);
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  log_call("stream_destroy", stream);
  Stream* destroyed = stream_of(stream);
  if (destroyed != stream) return kLaunchFailure;
  leave_capture(destroyed);
  delete destroyed;
  return device().failed() ? kLaunchFailure : 0;
}
int cuStreamSynchronize(void* stream) {
  log_call("synchronize", stream);
  if (forbidden_in_capture(stream_of(stream))) return kUnsupported;
  stream_of(stream)->drain();
  return device().failed() ? kLaunchFailure : 0;
}
int cuStreamQuery(void* stream) {
  if (device().failed()) return kLaunchFailure;
  if (forbidden_in_capture(stream_of(stream))) return kUnsupported;
  return stream_of(stream)->idle() ? 0 : kNotReady;
}
int cuEventCreate(void** event, unsigned flags) {
  *event = new Event{flags == 0};
  device().timed_events += flags == 0;
  return 0;
}
int cuEventDestroy_v2(void* handle) {
  auto* event = static_cast<Event*>(handle);
  device().timed_events -= event->timed;
  delete event;
  return device().failed() ? kLaunchFailure : 0;
}
int cuEventRecord(void* handle, void* stream) {
  auto* event = static_cast<Event*>(handle);
  log_call("event_record", stream, number("event", reinterpret_cast<std::uintptr_t>(handle)));
  if (captured_record(event, stream_of(stream))) return 0;
  event->done = std::make_shared<Signal>();
  event->passed = std::make_shared<std::uint64_t>(0);
  stream_of(stream)->put(item("event_record", [done = event->done, passed = event->passed] {
    *passed = emulated::now();
    raise(done);
  }));
  return 0;
}
int cuEventQuery(void* handle) {
  const auto* event = static_cast<Event*>(handle);
  if (event->capture != 0) return kUnsupported;
  if (device().failed()) return kLaunchFailure;
  return event->done->is_raised ? 0 : kNotReady;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;
  std::swap(current, *mode);
  return 0;
}
int cuEventElapsedTime(float* ms, void* begin, void* end) {
  const auto* from = static_cast<Event*>(begin);
  const auto* to = static_cast<Event*>(end);
  if (!from->timed || !to->timed) return 400;
  if (*from->passed == 0 || *to->passed == 0) return kNotReady;
  *ms = static_cast<float>(static_cast<std::int64_t>(*to->passed - *from->passed) * 1e-6);
  return 0;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* event = static_cast<Event*>(handle);
  log_call("event_wait", stream, number("event", reinterpret_cast<std::uintptr_t>(handle)));
  bool captured = false;
  const int refused = captured_wait(event, stream_of(stream), &captured);
  if (captured) return refused;
  stream_of(stream)->put(item("event_wait", [done = event->done] { await(done); }));
  return 0;
}
int cuMemcpyAsync(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, void* stream) {
  return put_copy({to, bytes}, {from, bytes}, bytes, 1, stream);
}
int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  const bool plain = copy->from_x == 0 && copy->from_y == 0 && copy->to_x == 0 && copy->to_y == 0;
  if (!plain || copy->from_kind != kUnified || copy->to_kind != kUnified) {
    return refuse("a copy of pieces is between unified addresses, without an offset");
  }
  if (copy->from_pitch < copy->width || copy->to_pitch < copy->width) {
    return refuse("pieces of a copy are wider than the step from one to the next");
  }
  return put_copy({copy->to, copy->to_pitch}, {copy->from, copy->from_pitch}, copy->width,
                  copy->height, stream);
}
int cuStreamWriteValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  log_call("write", stream, number("word", word) + ";" + number("value", value));
  stream_of(stream)->put(item("write", [=] { write_word(word, value); }));
  return 0;
}
int cuStreamWaitValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  if (device().waits_forbidden(word)) return refuse(kForeign);
  log_call("wait", stream, number("word", word) + ";" + number("value", value));
  stream_of(stream)->put(item("wait", [=] { await_word(word, value); }));
  return 0;
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const BatchOp* ops, unsigned) {
  if (count > kMostOps) return refuse(std::to_string(count) + " operations, of less than 256");
  std::uint64_t waits = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (ops[i].operation != 1) continue;
    ++waits;
    if (device().waits_forbidden(ops[i].address)) return refuse(kForeign);
  }
  for (unsigned i = 0; i < count; ++i) {
    if (!device().first_use("memory operation", ops[i].address)) return kLaunchFailure;
  }
  log_call("batch", stream, number("waits", waits) + ";" + number("writes", count - waits));
  stream_of(stream)->put(item("batch", [all = std::vector<BatchOp>(ops, ops + count)] {
    for (const BatchOp& op : all) {
      (op.operation == 1 ? await_word : write_word)(op.address,
                                                    static_cast<std::uint32_t>(op.value));
    }
  }));
  return 0;
}
int cuMemsetD32Async(std::uintptr_t words, unsigned value, std::size_t count, void* stream) {
  if (!device().first_use("fill", words)) return kLaunchFailure;
  log_call("fill", stream, number("words", count) + ";" + number("to", words));
  put_transfer("fill", stream, device().copies_need_room && device().is_own(words), [=] {
    observed(words, 0, 4 * count, true, [=] {
      for (std::size_t i = 0; i < count; ++i) reinterpret_cast<std::uint32_t*>(words)[i] = value;
    });
  });
  return 0;
}

}  // extern "C"
