// A GPU for tests: the entry points of the CUDA driver that flux looks up, and kernels behind the C
// ABI, on threads of the CPU. Streams run at the same time and in any interleaving, memory is the
// process's own, and every copy and kernel tile can be delayed at random. The kernels follow the
// contract of csrc/cuda/abi.h: same tile order, same waits, same flags, written down once more in the
// simplest way.
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "batch_op.h"
#include "cuda/arguments.h"
#include "emulated_trace.h"
#include "multicast.h"

namespace {

using namespace flux;
using Clock = std::chrono::steady_clock;

std::atomic<int> delay_us{0};
std::atomic<int> streams_alive{0};
std::atomic<int> timed_events{0};
std::atomic<bool> copies_refused{false};
std::atomic<bool> launches_refused{false};

void dawdle() {
  const int most = delay_us.load();
  if (most == 0) return;
  thread_local std::mt19937 random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  // Seldom and long: everybody else gets far ahead meanwhile.
  if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(most));
}

struct Graph;

class Stream {
 public:
  Graph* capture = nullptr;  // that takes what is put here; only threads of the host look at it

  Stream() : thread_([this] { work(); }) { ++streams_alive; }
  ~Stream() {
    put([this] { over_ = true; });
    thread_.join();
    --streams_alive;
  }
  void put(std::function<void()> task) {
    if (capture != nullptr) return note(std::move(task));
    const std::lock_guard<std::mutex> hold(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return tasks_.empty();
  }
  void drain() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [this] { return tasks_.empty(); });
  }

 private:
  void note(std::function<void()> task);
  void work() {
    while (!over_) {
      std::unique_lock<std::mutex> hold(mutex_);
      changed_.wait(hold, [this] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();  // counted until it has run
      hold.unlock();
      task();
      hold.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool over_ = false;
  std::thread thread_;
};

using Flag = std::shared_ptr<std::atomic<bool>>;

struct Event {
  bool timed = false;
  Flag done = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::uint64_t> passed = std::make_shared<std::uint64_t>(0);  // when
  std::uint64_t capture = 0;  // of its last record; 0: none
  int number = 0;             // within that
};

// What was put on streams while they were captured. A replay does it again, on the stream that it is
// launched on and on streams of the graph's own, with events of its own.
struct Graph {
  struct Node {
    int stream;  // in order of appearance; 0 is the one on which the capture began
    std::function<void()> task;
    int records = -1, awaits = -1;  // events, by number
  };
  std::uint64_t id;
  std::vector<Stream*> streams;
  std::vector<Node> nodes;
  int events = 0;
  std::vector<std::unique_ptr<Stream>> own;

  int index(Stream* stream) {
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (streams[i] == stream) return static_cast<int>(i);
    }
    streams.push_back(stream);
    stream->capture = this;
    return static_cast<int>(streams.size()) - 1;
  }
  void end() {
    for (Stream* stream : streams) stream->capture = nullptr;
    for (std::size_t i = 1; i < streams.size(); ++i) own.push_back(std::make_unique<Stream>());
  }
  void replay(Stream* on) {
    std::vector<Flag> done;
    for (int i = 0; i < events; ++i) done.push_back(std::make_shared<std::atomic<bool>>(false));
    for (const Node& node : nodes) {
      Stream* stream = node.stream == 0 ? on : own[node.stream - 1].get();
      if (node.records >= 0) {
        stream->put([flag = done[node.records]] { *flag = true; });
      } else if (node.awaits >= 0) {
        stream->put([flag = done[node.awaits]] {
          while (!*flag) std::this_thread::sleep_for(std::chrono::microseconds(20));
        });
      } else {
        stream->put(node.task);
      }
    }
  }
};

void Stream::note(std::function<void()> task) {
  const int stream = capture->index(this);
  capture->nodes.push_back({stream, std::move(task)});
}

Stream* stream_of(void* handle) { return static_cast<Stream*>(handle); }

std::uint32_t load(const std::uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(std::uint32_t* word, std::uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
void nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// -- kernels ---------------------------------------------------------------------------------------

constexpr int kTileM = 4;
constexpr int kTileN = 8;
constexpr int kBlock = 3;  // each kernel has one, which does everything

float to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

bool await(const std::uint32_t* words, int index, const FluxSync& sync, int code, int tile) {
  const auto begin = Clock::now();
  const std::uint64_t stamp = emulated::now();
  for (bool first = true;; first = false) {
    const std::uint32_t seen = load(words + index);
    if (epoch_reached(seen, sync.epoch)) {
      if (!first) emulated::tell(sync, stamp, FLUX_TRACE_WAIT, tile, code, index, kBlock);
      return true;
    }
    if (__atomic_load_n(sync.status, __ATOMIC_ACQUIRE) != 0) return false;
    if (Clock::now() - begin > std::chrono::nanoseconds(sync.timeout_ns)) {
      sync.status[FLUX_STATUS_TILE] = tile;
      sync.status[FLUX_STATUS_SIGNAL] = index;
      sync.status[FLUX_STATUS_EXPECTED] = sync.epoch;
      sync.status[FLUX_STATUS_OBSERVED] = seen;
      __atomic_store_n(sync.status, code, __ATOMIC_RELEASE);
      return false;
    }
    nap();
  }
}

// e4m3: no infinities; exponent and mantissa all ones are NaN.
float to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
  return (bits & 128) != 0 ? -size : size;
}

enum class Scaling { kNone, kTensor, kRow };
enum class Activation { kNone, kSilu };

// What the kernels of flux.kernels have as template parameters.
template <class E, bool kWeightKN = false, Scaling kScale = Scaling::kNone,
          Activation kActivate = Activation::kNone, bool kFlying = false>
struct Config {
  using Element = E;
  static constexpr bool kTransposed = kWeightKN;
  static constexpr Scaling kScaling = kScale;
  static constexpr Activation kActivation = kActivate;
  static constexpr bool kInFlight = kFlying;
};

template <class C>
float dot(const FluxGemmArgs& args, int row, int column) {
  using Element = typename C::Element;
  auto const* a = static_cast<const Element*>(args.a) + row * args.lda;
  auto const* b = static_cast<const Element*>(args.b);
  float sum = 0;
  for (int k = 0; k < args.k; ++k) {
    sum += to_float(a[k]) *
           to_float(b[C::kTransposed ? k * args.ldb + column : column * args.ldb + k]);
  }
  if (C::kScaling == Scaling::kRow) sum *= args.scale_a[row] * args.scale_b[column];
  if (C::kScaling == Scaling::kTensor) sum *= args.scale_a[0] * args.scale_b[0];
  return args.alpha * sum;
}

template <class C>
void store_tile(const FluxGemmArgs& args, TileCoord tile) {
  for (int r = tile.m * kTileM; r < min_of(args.m, (tile.m + 1) * kTileM); ++r) {
    for (int c = tile.n * kTileN; c < min_of(args.n, (tile.n + 1) * kTileN); ++c) {
      float value = dot<C>(args, r, c);
      if (args.bias != nullptr) value += to_float(static_cast<const std::uint16_t*>(args.bias)[c]);
      if (C::kActivation == Activation::kSilu) value /= 1 + std::exp(-value);
      static_cast<std::uint16_t*>(args.d)[r * args.ldd + c] = to_bf16(value);
    }
  }
}

template <class C>
void run_ag_gemm(const FluxGemmArgs& args) {
  const TileMap map = tile_map(tile_order(args, OpKind::kAGGemm, kTileM, kTileN));
  const CommTiling tiling = comm_tiling(args);
  for (int slot = 0; slot < map.rows * map.columns; ++slot) {
    const TileCoord tile = tile_at(map, slot);
    const int begin = tile.m * kTileM;
    const Range waits = signals_of_rows(tiling, begin, min_of(begin + kTileM, args.m));
    for (int i = waits.begin; args.signals != nullptr && i < waits.end; ++i) {
      await(args.signals, i, args.sync, FLUX_WAIT_GATHER, tile.m);
    }
    const std::uint64_t began = emulated::now();
    dawdle();
    store_tile<C>(args, tile);
    emulated::tell(args.sync, began, FLUX_TRACE_TILE, tile.m, tile.n, 0, kBlock);
  }
}

std::mutex adding;  // memory adds element by element, whoever sends

template <class C>
void run_gemm_rs(const FluxGemmArgs& args) {
  const TileMap map = tile_map(tile_order(args, OpKind::kGemmRS, kTileM, kTileN));
  const ScatterTargets to = scatter_targets(args, kTileM, kTileN);
  for (int slot = 0; slot < map.rows * map.columns; ++slot) {
    const TileCoord tile = tile_at(map, slot);
    const Range owners = owners_of_tile(to.tiling, tile.m);
    const std::uint64_t begin = emulated::now();
    bool free[FLUX_MAX_WORLD] = {};
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      FluxSync sync = to.sync;
      if (sync.count != nullptr) sync.epoch = *sync.count;
      free[owner] =
          to.entries == nullptr || await(to.entries, owner, sync, FLUX_WAIT_ENTRY, tile.m);
    }
    dawdle();
    for (int r = tile.m * kTileM; r < min_of(args.m, (tile.m + 1) * kTileM); ++r) {
      const int owner = owner_of(args.m, to.tiling.world, r);
      if (!free[owner]) continue;
      auto* row = static_cast<std::uint16_t*>(to.slots[owner]) +
                  (r - row_begin(args.m, to.tiling.world, owner)) * to.ld;
      for (int c = tile.n * kTileN; c < min_of(args.n, (tile.n + 1) * kTileN); ++c) {
        const float value = dot<C>(args, r, c);
        const std::lock_guard<std::mutex> hold(adding);
        row[c] = to_bf16(C::kInFlight ? to_float(row[c]) + value : value);
      }
    }
    emulated::tell(to.sync, begin, FLUX_TRACE_TILE, tile.m, tile.n, 0, kBlock);
    const std::uint64_t stored = emulated::now();
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      if (!free[owner]) continue;
      store(to.flags[owner] + flag_index(to.tiling, to.rank, owner, tile.m, tile.n), to.sync.epoch);
    }
    emulated::tell(to.sync, stored, FLUX_TRACE_RELEASE, tile.m, tile.n, 0, kBlock);
  }
}

// What a rank has summed up, where it goes: to all by the switch, or to each.
void put_sum(const FluxReduceArgs& args, std::int64_t at, std::uint16_t sum) {
  if (args.switch_out != nullptr) {
    for (auto* to : everywhere(static_cast<std::uint16_t*>(args.switch_out) + at)) *to = sum;
    return;
  }
  for (int out = 0; out < args.out_count; ++out) {
    static_cast<std::uint16_t*>(args.outs[out])[at] = sum;
  }
}

float sum_of_sources(const FluxReduceArgs& args, std::int64_t at) {
  float sum = 0;
  if (args.switch_in != nullptr) {
    for (auto* from : everywhere(static_cast<const std::uint16_t*>(args.switch_in) + at)) {
      sum += to_float(*from);
    }
    return to_float(to_bf16(sum));  // as the switch gives it
  }
  for (int source = 0; source < args.slot_count; ++source) {
    sum += to_float(static_cast<const std::uint16_t*>(args.slots[source])[at]);
  }
  return sum;
}

void sum_tile(const FluxReduceArgs& args, Range rows, Range columns, bool complete) {
  for (int r = rows.begin; r < rows.end; ++r) {
    for (int c = columns.begin; c < columns.end; ++c) {
      float sum = complete ? sum_of_sources(args, r * args.slot_ld + c) : std::nanf("");
      sum *= args.scale;
      if (args.bias != nullptr) sum += to_float(static_cast<const std::uint16_t*>(args.bias)[c]);
      put_sum(args, r * args.out_ld + c, to_bf16(sum));
    }
  }
}

// The last tile first: each must rely on its own flags, whatever order they are raised in.
void run_reduce(const FluxReduceArgs& args) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const Range tiles = tiles_of_owner(s, args.rank);
  for (int row = tiles.end - 1; row >= tiles.begin; --row) {
    const Range rows{max_of(row * args.tile_m - args.first_row, 0),
                     min_of((row + 1) * args.tile_m - args.first_row, args.rows)};
    for (int column = flag_columns(s) - 1; column >= 0; --column) {
      bool complete = true;
      if (rows.begin >= rows.end) continue;
      for (int i = 0; args.flags != nullptr && i < args.source_count; ++i) {
        const int flag = flag_index(s, args.first_source + i, args.rank, row, column);
        complete &= await(args.flags, flag, args.sync, FLUX_WAIT_PARTIAL, row);
      }
      const Range columns{column * args.tile_n, min_of((column + 1) * args.tile_n, args.n)};
      const std::uint64_t begin = emulated::now();
      dawdle();
      sum_tile(args, rows, columns, complete);
      emulated::tell(args.sync, begin, FLUX_TRACE_SUM, args.first_row + rows.begin, column,
                     rows.end - rows.begin, kBlock);
    }
  }
}

// What is done to one rank at a time, as the threads of the kernel's one block do it.
void run_meet(const FluxMeetArgs& args) {
  for (int i = 0; i < args.reset_count; ++i) store(args.reset + i, 0);
  const std::uint32_t number = *args.count += args.advance;
  dawdle();
  FluxSync sync = args.sync;
  sync.epoch = number;
  for (int rank = 0; rank < args.world; ++rank) store(args.raised[rank], number);
  bool complete = true;
  for (int rank = 0; args.awaited != nullptr && rank < args.world; ++rank) {
    complete &= await(args.awaited, rank, sync, FLUX_WAIT_MEET, 0);
  }
  for (int rank = 0; !complete && rank < args.world; ++rank) {
    if (rank == args.rank) continue;
    args.statuses[rank][FLUX_STATUS_SIGNAL] = args.rank;
    args.statuses[rank][FLUX_STATUS_EXPECTED] = number;
    __atomic_store_n(args.statuses[rank], FLUX_ABANDONED, __ATOMIC_RELEASE);
  }
}

constexpr int kIsolation = 905;  // cudaErrorStreamCaptureIsolation
Graph* capturing = nullptr;      // the capture that is under way: of the emulator there is one

template <auto kRun, class Args>
int launch(const Args* args, void* stream) {
  if (launches_refused) return FLUX_REFUSED;
  stream_of(stream)->put([copy = *args] { kRun(copy); });
  return FLUX_OK;
}
int meet(const FluxMeetArgs* args, void* stream) { return launch<run_meet>(args, stream); }
int reduce(const FluxReduceArgs* args, void* stream) { return launch<run_reduce>(args, stream); }
std::uint64_t no_workspace(const FluxGemmArgs*) { return 0; }
int prepare(int) { return FLUX_OK; }
int stamp(std::uint64_t* times, std::int32_t count, void* stream) {
  stream_of(stream)->put([=] { emulated::stamp(times, count); });
  return FLUX_OK;
}
// Kernels of other builds do not look at the trace.
template <auto kRun>
void untraced(const FluxGemmArgs& args) {
  FluxGemmArgs blind = args;
  blind.sync.trace = nullptr;
  kRun(blind);
}

}  // namespace

extern "C" {

#define EMULATED(symbol, version, reduction, ...)                                           \
  extern const FluxKernel symbol = {version,  sizeof(FluxGemmArgs),                         \
                                    #symbol,  kTileM,                                       \
                                    kTileN,   &no_workspace,                                \
                                    &prepare, &launch<untraced<__VA_ARGS__>, FluxGemmArgs>, \
                                    &meet,    reduction,                                    \
                                    nullptr};                                               \
  extern const FluxKernel symbol##_traced = {version,                                       \
                                             sizeof(FluxGemmArgs),                          \
                                             #symbol "_traced",                             \
                                             kTileM,                                        \
                                             kTileN,                                        \
                                             &no_workspace,                                 \
                                             &prepare,                                      \
                                             &launch<__VA_ARGS__, FluxGemmArgs>,            \
                                             &meet,                                         \
                                             reduction,                                     \
                                             &stamp};
#define EMULATED_AG(suffix, ...)                                     \
  EMULATED(flux_emulated_ag_gemm##suffix, FLUX_ABI_VERSION, nullptr, \
           run_ag_gemm<Config<__VA_ARGS__>>)
#define EMULATED_RS(suffix, ...)                                     \
  EMULATED(flux_emulated_gemm_rs##suffix, FLUX_ABI_VERSION, &reduce, \
           run_gemm_rs<Config<__VA_ARGS__>>)

#define EMULATED_BOTH_WEIGHTS(suffix, kn)                                                     \
  EMULATED_AG(suffix, std::uint16_t, kn)                                                      \
  EMULATED_AG(suffix##_silu, std::uint16_t, kn, Scaling::kNone, Activation::kSilu)            \
  EMULATED_AG(suffix##_tensor, std::uint8_t, kn, Scaling::kTensor)                            \
  EMULATED_AG(suffix##_row, std::uint8_t, kn, Scaling::kRow)                                  \
  EMULATED_RS(suffix, std::uint16_t, kn)                                                      \
  EMULATED_RS(suffix##_in_flight, std::uint16_t, kn, Scaling::kNone, Activation::kNone, true) \
  EMULATED_RS(suffix##_tensor, std::uint8_t, kn, Scaling::kTensor)                            \
  EMULATED_RS(suffix##_row, std::uint8_t, kn, Scaling::kRow)

EMULATED_BOTH_WEIGHTS(_nk, false)
EMULATED_BOTH_WEIGHTS(_kn, true)
EMULATED(flux_emulated_old, FLUX_ABI_VERSION + 1, nullptr, run_ag_gemm<Config<std::uint16_t>>)

// Runs a function of the host on a stream.
void emulator_put(void* stream, void (*body)()) { stream_of(stream)->put(body); }
void emulator_run(void* stream, void (*body)(void*), void* argument) {
  stream_of(stream)->put([=] { body(argument); });
}
void emulator_dawdle() { dawdle(); }
void emulator_set_delay(int us) { delay_us = us; }
int emulator_streams() { return streams_alive; }
void emulator_refuse_copies(int yes) { copies_refused = yes != 0; }
void emulator_refuse_launches(int yes) { launches_refused = yes != 0; }

int cuGetErrorString(int, const char** text) {
  *text = "emulated failure";
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new Stream;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  delete stream_of(stream);
  return 0;
}
int cuStreamSynchronize(void* stream) {
  stream_of(stream)->drain();
  return 0;
}
int cuStreamQuery(void* stream) { return stream_of(stream)->idle() ? 0 : 600; }
int cuEventCreate(void** event, unsigned flags) {
  *event = new Event{flags == 0};
  timed_events += flags == 0;
  return 0;
}
int cuEventDestroy_v2(void* handle) {
  auto* event = static_cast<Event*>(handle);
  timed_events -= event->timed;
  delete event;
  return 0;
}
int emulator_timed_events() { return timed_events; }
int cuEventRecord(void* handle, void* stream) {
  auto* event = static_cast<Event*>(handle);
  if (Graph* graph = stream_of(stream)->capture; graph != nullptr) {
    event->capture = graph->id;
    event->number = graph->events++;
    graph->nodes.push_back({graph->index(stream_of(stream)), {}, event->number, -1});
    return 0;
  }
  event->capture = 0;
  event->done = std::make_shared<std::atomic<bool>>(false);
  event->passed = std::make_shared<std::uint64_t>(0);
  stream_of(stream)->put([done = event->done, passed = event->passed] {
    *passed = emulated::now();
    *done = true;
  });
  return 0;
}
int cuEventElapsedTime(float* ms, void* begin, void* end) {
  const auto* from = static_cast<Event*>(begin);
  const auto* to = static_cast<Event*>(end);
  if (!from->timed || !to->timed) return 400;
  if (*from->passed == 0 || *to->passed == 0) return 600;
  *ms = static_cast<float>(static_cast<std::int64_t>(*to->passed - *from->passed) * 1e-6);
  return 0;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* event = static_cast<Event*>(handle);
  Graph* graph = stream_of(stream)->capture;
  if (event->capture != 0) {
    if (graph == nullptr) graph = capturing;
    if (graph == nullptr || graph->id != event->capture) return kIsolation;
    graph->nodes.push_back({graph->index(stream_of(stream)), {}, -1, event->number});
    return 0;
  }
  if (graph != nullptr) return kIsolation;
  stream_of(stream)->put([done = event->done] {
    while (!*done) nap();
  });
  return 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, std::uint64_t* id, void**, const void**,
                              std::size_t*) {
  const Graph* graph = stream_of(stream)->capture;
  *status = graph != nullptr ? 1 : 0;
  if (graph != nullptr) *id = graph->id;
  return 0;
}
void emulator_begin_capture(void* stream) {
  static std::uint64_t graphs = 0;
  capturing = new Graph{++graphs};
  capturing->index(stream_of(stream));
}
void* emulator_end_capture() {
  capturing->end();
  return std::exchange(capturing, nullptr);
}
void emulator_replay(void* graph, void* stream) {
  static_cast<Graph*>(graph)->replay(stream_of(stream));
}
void emulator_destroy_graph(void* graph) { delete static_cast<Graph*>(graph); }
int cuMemcpyAsync(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, void* stream) {
  if (copies_refused) return 1;
  stream_of(stream)->put([=] {
    dawdle();
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  });
  return 0;
}
int cuStreamWriteValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  stream_of(stream)->put([=] { store(reinterpret_cast<std::uint32_t*>(word), value); });
  return 0;
}
int cuStreamWaitValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  stream_of(stream)->put([=] {
    while (!epoch_reached(load(reinterpret_cast<std::uint32_t*>(word)), value)) nap();
  });
  return 0;
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const BatchOp* ops, unsigned) {
  return one_by_one(stream, count, ops, &cuStreamWaitValue32_v2, &cuStreamWriteValue32_v2);
}
int cuMemsetD32Async(std::uintptr_t words, unsigned value, std::size_t count, void* stream) {
  stream_of(stream)->put([=] {
    for (std::size_t i = 0; i < count; ++i) reinterpret_cast<std::uint32_t*>(words)[i] = value;
  });
  return 0;
}

}  // extern "C"
