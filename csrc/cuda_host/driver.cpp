#include "cuda_host/driver.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace flux::host {

namespace {

// Values of the driver API (cuda.h), which never change.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kWriteDefault = 0;
constexpr unsigned kWaitGreaterOrEqual = 0;  // (int32)(*address - value) >= 0
constexpr int kCaptureActive = 1;
constexpr int kCaptureInvalidated = 2;
constexpr int kCaptureRelaxed = 2;
constexpr int kOpWait = 1;
constexpr int kOpWrite = 2;
constexpr int kUnified = 4;            // CU_MEMORYTYPE_UNIFIED: an address says where it is
constexpr int kNativeAtomics = 3;      // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
constexpr std::size_t kMostOps = 255;  // per cuStreamBatchMemOp; cuda.h requires less than 256

}  // namespace

// CUstreamBatchMemOpParams: waits and writes of 32 bits have the same layout in it.
union BatchOp {
  struct {
    int operation;
    std::uint64_t address;
    std::uint64_t value;
    unsigned flags;
    std::uint64_t alias;  // for the driver's use
  } word;
  std::uint64_t pad[6];
};
static_assert(sizeof(BatchOp) == 48);

// CUDA_MEMCPY2D_v2
struct Copy2D {
  std::size_t from_x, from_y;
  int from_kind;
  const void* from_host;
  Address from;
  void* from_array;
  std::size_t from_pitch;
  std::size_t to_x, to_y;
  int to_kind;
  void* to_host;
  Address to;
  void* to_array;
  std::size_t to_pitch;
  std::size_t width, height;
};
static_assert(sizeof(Copy2D) == 128);

struct Driver::Entries {
  int (*error_string)(int, const char**);
  int (*priority_range)(int*, int*);
  int (*stream_create)(void**, unsigned, int);
  int (*stream_destroy)(void*);
  int (*stream_synchronize)(void*);
  int (*stream_query)(void*);
  int (*event_create)(void**, unsigned);
  int (*event_destroy)(void*);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_elapsed)(float*, void*, void*);
  int (*stream_wait_event)(void*, void*, unsigned);
  int (*copy)(Address, Address, std::size_t, void*);
  int (*copy_2d)(const Copy2D*, void*);
  int (*write_value)(void*, Address, std::uint32_t, unsigned);
  int (*wait_value)(void*, Address, std::uint32_t, unsigned);
  int (*batch)(void*, unsigned, BatchOp*, unsigned);
  int (*fill)(Address, unsigned, std::size_t, void*);
  int (*exchange_mode)(int*);
  int (*capture_info)(void*, int*, std::uint64_t*, void**, const void**, std::size_t*);
};

Driver::Driver(const std::string& library) : library_(library, "the CUDA driver") {
  entries_ = std::make_shared<Entries>();
  library_.look_up("cuGetErrorString", &entries_->error_string);
  library_.look_up("cuCtxGetStreamPriorityRange", &entries_->priority_range);
  library_.look_up("cuStreamCreateWithPriority", &entries_->stream_create);
  library_.look_up("cuStreamDestroy_v2", &entries_->stream_destroy);
  library_.look_up("cuStreamSynchronize", &entries_->stream_synchronize);
  library_.look_up("cuStreamQuery", &entries_->stream_query);
  library_.look_up("cuEventCreate", &entries_->event_create);
  library_.look_up("cuEventDestroy_v2", &entries_->event_destroy);
  library_.look_up("cuEventRecord", &entries_->event_record);
  library_.look_up("cuEventQuery", &entries_->event_query);
  library_.look_up("cuEventElapsedTime", &entries_->event_elapsed);
  library_.look_up("cuStreamWaitEvent", &entries_->stream_wait_event);
  library_.look_up("cuMemcpyAsync", &entries_->copy);
  library_.look_up("cuMemcpy2DAsync_v2", &entries_->copy_2d);
  library_.look_up("cuStreamWriteValue32_v2", &entries_->write_value);
  library_.look_up("cuStreamWaitValue32_v2", &entries_->wait_value);
  library_.look_up("cuStreamBatchMemOp_v2", &entries_->batch);
  library_.look_up("cuMemsetD32Async", &entries_->fill);
  library_.look_up("cuThreadExchangeStreamCaptureMode", &entries_->exchange_mode);
  library_.look_up("cuStreamGetCaptureInfo_v2", &entries_->capture_info);
}

void Driver::check(int result, const char* what) const {
  if (result == kSuccess) return;
  const char* text = nullptr;
  entries_->error_string(result, &text);
  throw std::runtime_error(std::string(what) + " failed: " +
                           (text != nullptr ? text : "CUDA error " + std::to_string(result)));
}

Stream Driver::create_stream() {
  int least = 0;
  int greatest = 0;
  check(entries_->priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  void* stream = nullptr;
  check(entries_->stream_create(&stream, kStreamNonBlocking, greatest),
        "cuStreamCreateWithPriority");
  return reinterpret_cast<Stream>(stream);
}

void Driver::destroy_stream(Stream stream) noexcept {
  entries_->stream_destroy(reinterpret_cast<void*>(stream));
}

void Driver::synchronize(Stream stream) {
  check(entries_->stream_synchronize(reinterpret_cast<void*>(stream)), "cuStreamSynchronize");
}

bool Driver::ready(Stream stream) {
  const int result = entries_->stream_query(reinterpret_cast<void*>(stream));
  if (result == kNotReady) return false;
  check(result, "cuStreamQuery");
  return true;
}

void Driver::order_after(Stream later, Stream earlier) {
  void* event = nullptr;
  check(entries_->event_create(&event, kEventDisableTiming), "cuEventCreate");
  const std::shared_ptr<void> owned(event, [this](void* e) { entries_->event_destroy(e); });
  record(reinterpret_cast<Event>(event), earlier);
  await_event(later, reinterpret_cast<Event>(event));
}

std::shared_ptr<const Stream> Driver::rescue_stream() {
  std::shared_ptr<const Stream> stream = rescue_.lock();
  if (stream) return stream;
  // The deleter holds the entry points and not the driver, which may end before the last op.
  stream = std::shared_ptr<const Stream>(new Stream(create_stream()),
                                         [library = library_, entries = entries_](const Stream* s) {
                                           entries->stream_destroy(reinterpret_cast<void*>(*s));
                                           delete s;
                                         });
  rescue_ = stream;
  return stream;
}

Event Driver::create_event() {
  void* event = nullptr;
  check(entries_->event_create(&event, kEventDisableTiming), "cuEventCreate");
  return reinterpret_cast<Event>(event);
}

Event Driver::create_timed_event() {
  void* event = nullptr;
  check(entries_->event_create(&event, kEventDefault), "cuEventCreate");
  return reinterpret_cast<Event>(event);
}

double Driver::elapsed_ns(Event begin, Event end) {
  float ms = 0;
  check(entries_->event_elapsed(&ms, reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end)),
        "cuEventElapsedTime");
  return static_cast<double>(ms) * 1e6;
}

void Driver::destroy_event(Event event) noexcept {
  entries_->event_destroy(reinterpret_cast<void*>(event));
}

void Driver::record(Event event, Stream stream) {
  check(entries_->event_record(reinterpret_cast<void*>(event), reinterpret_cast<void*>(stream)),
        "cuEventRecord");
}

void Driver::await_event(Stream stream, Event event) {
  check(entries_->stream_wait_event(reinterpret_cast<void*>(stream), reinterpret_cast<void*>(event),
                                    0),
        "cuStreamWaitEvent");
}

// A query would break a capture that goes on in some thread, unless the mode of this one is relaxed.
bool Driver::passed(Event event) {
  int mode = kCaptureRelaxed;
  check(entries_->exchange_mode(&mode), "cuThreadExchangeStreamCaptureMode");
  const int result = entries_->event_query(reinterpret_cast<void*>(event));
  check(entries_->exchange_mode(&mode), "cuThreadExchangeStreamCaptureMode");
  if (result == kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void Driver::copy(Stream stream, Address to, Address from, std::size_t bytes) {
  if (bytes == 0) return;
  check(entries_->copy(to, from, bytes, reinterpret_cast<void*>(stream)), "cuMemcpyAsync");
}

void Driver::copy_rows(Stream stream, Address to, std::size_t to_step, Address from,
                       std::size_t from_step, std::size_t bytes, std::size_t rows) {
  if (bytes == 0 || rows == 0) return;
  if (rows == 1 || (to_step == bytes && from_step == bytes)) {
    return copy(stream, to, from, bytes * rows);
  }
  Copy2D pieces{};
  pieces.from_kind = pieces.to_kind = kUnified;
  pieces.from = from;
  pieces.from_pitch = from_step;
  pieces.to = to;
  pieces.to_pitch = to_step;
  pieces.width = bytes;
  pieces.height = rows;
  check(entries_->copy_2d(&pieces, reinterpret_cast<void*>(stream)), "cuMemcpy2DAsync");
}

void Driver::signal(Stream stream, Address word, std::uint32_t value) {
  check(entries_->write_value(reinterpret_cast<void*>(stream), word, value, kWriteDefault),
        "cuStreamWriteValue32");
}

void Driver::await_signal(Stream stream, Address word, std::uint32_t value) {
  check(entries_->wait_value(reinterpret_cast<void*>(stream), word, value, kWaitGreaterOrEqual),
        "cuStreamWaitValue32");
}

void Driver::memory_ops(Stream stream, const std::vector<MemOp>& ops) {
  BatchOp batch[kMostOps];  // not initialised: calls are frequent, and most are small
  for (std::size_t first = 0; first < ops.size(); first += kMostOps) {
    const std::size_t count = std::min(kMostOps, ops.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      const MemOp& op = ops[first + i];
      const bool wait = op.kind == MemOp::kWait;
      batch[i].word = {wait ? kOpWait : kOpWrite, op.word, op.value,
                       wait ? kWaitGreaterOrEqual : kWriteDefault, 0};
    }
    check(entries_->batch(reinterpret_cast<void*>(stream), static_cast<unsigned>(count), batch, 0),
          "cuStreamBatchMemOp");
  }
}

void Driver::fill(Stream stream, Address words, std::uint32_t value, std::size_t count) {
  if (count == 0) return;
  check(entries_->fill(words, value, count, reinterpret_cast<void*>(stream)), "cuMemsetD32Async");
}

bool Driver::peer_atomics(int device, int peer) const {
  int (*get)(int*, int) = nullptr;
  int (*attribute)(int*, int, int, int) = nullptr;
  library_.look_up("cuDeviceGet", &get);
  library_.look_up("cuDeviceGetP2PAttribute", &attribute);
  int from = 0, to = 0, native = 0;
  check(get(&from, device), "cuDeviceGet");
  check(get(&to, peer), "cuDeviceGet");
  check(attribute(&native, kNativeAtomics, from, to), "cuDeviceGetP2PAttribute");
  return native != 0;
}

std::uint64_t Driver::capture(Stream stream) {
  int status = 0;
  std::uint64_t id = 0;
  check(entries_->capture_info(reinterpret_cast<void*>(stream), &status, &id, nullptr, nullptr,
                               nullptr),
        "cuStreamGetCaptureInfo");
  if (status == kCaptureInvalidated) {
    throw std::runtime_error("the capture of this stream has failed before");
  }
  return status == kCaptureActive ? id : 0;
}

}  // namespace flux::host
