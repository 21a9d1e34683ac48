// Stand-in kernels of the emulated GPU, behind the C ABI. They follow the contract of csrc/cuda/abi.h
// (same tile order, waits and flags) in the simplest way, on tiles of 4 x 8 and in blocks that wait for
// room. What flux's own kernels do is tested with those, on the PTX machine; stand-ins are left for:
//
// - Rules of GPUs that the emulated one enforces for them alone: kernels that are loaded lazily, blocks
//   that starve, copies that need a multiprocessor, launches that are refused, tiles that are delayed
//   or recorded (test_emulated_rules.py, test_gpu_rules*.py, test_nvtx.py).
// - Hundreds of calls in a test, such as sweeps over knobs and M of a few rows. A call takes a
//   millisecond here, and ten to a hundred on the PTX machine.
// - Operands that the minimal set has no kernel for: float8 and its scales, weights as [K, N], any
//   alignment, silu, sums in flight. Of these kernels a compiler takes up to a minute each.
// - Traces, the benchmark and the tuner, which would need more kernels built, or call them often.
// - Machines without nvcc or CUTLASS, where tests with flux's kernels are skipped.
#include <algorithm>
#include <cmath>

#include "cuda/arguments.h"
#include "emulated_math.h"
#include "emulated_sums.h"
#include "emulated_sync.h"
#include "gpu/device.h"

namespace {

using namespace flux;
using emulated::device;
using emulated::Ending;
using emulated::Footprint;
using emulated::Place;
using emulated::TensorMap;
using emulated::to_bf16;
using emulated::to_float;
using emulated::Wait;
using emulated::Work;

constexpr int kTileM = 4;
constexpr int kTileN = 8;
// What the sm_90a kernels store at once.
constexpr int kBoxRows = 4;
constexpr int kBoxColumns = 4;

// With this, one block of a GEMM fills a multiprocessor.
constexpr Footprint kGemm{384, 168, 227 << 10};
constexpr Footprint kReduction{1024, 32, 0};

// The code of a kernel: loaded onto the device by `prepare`, or by its first launch.
struct Code {
  const char* name;
  int loaded = 0;  // onto which of the devices that followed one another

  bool load() {
    if (loaded != device().generation && !device().load_module(name)) return false;
    loaded = device().generation;
    return true;
  }
};

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

void lay_out_gemm(const FluxGemmArgs& args, int tiles, bool reports, Work* work) {
  const int sms = args.sm_count > 0 ? args.sm_count : emulated::kMultiprocessors;
  work->footprint = kGemm;
  work->units = tiles;
  work->blocks = min_of(tiles, sms);
  emulated::set_sync(args.sync, reports, work);
}

// The launch of a kernel that pushes its rows: its number, once it has begun.
struct Pushing {
  std::uint32_t number = 0;
  bool begun = false;
};

// Pushes the rows, where the first block begins.
void push_rows(const FluxGemmArgs& args, Pushing* pushing) {
  const FluxGather& g = args.gather;
  if (pushing->begun) return;
  *pushing = {g.counts[FLUX_GATHER_CALLS] + 1, true};
  if (g.last != 0) g.counts[FLUX_GATHER_CALLS] = pushing->number;
  if (g.first == 0 || __atomic_load_n(args.sync.status, __ATOMIC_ACQUIRE) != 0) return;
  const std::uint64_t began = emulated::now();
  const auto ahead = static_cast<std::uintptr_t>(pushing->number % 2 != 0 ? g.odd : 0);
  for (int rank = 0; rank < args.order.world && g.bytes > 0; ++rank) {
    emulated::write(reinterpret_cast<std::uintptr_t>(g.to[rank]) + ahead, g.rows, g.bytes);
  }
  emulated::dawdle();
  for (int rank = 0; rank < args.order.world; ++rank) {
    emulated::store(g.raised[rank], pushing->number);
  }
  emulated::tell(args.sync, began, FLUX_TRACE_PUSH, 0, 0, 1, {});
}

template <class C>
int make_ag_gemm(const FluxGemmArgs& args, Work* work) {
  const TileMap map = tile_map(tile_order(args, OpKind::kAGGemm, kTileM, kTileN));
  const CommTiling tiling = comm_tiling(args);
  const bool pushes = args.gather.counts != nullptr;
  const auto pushing = std::make_shared<Pushing>(Pushing{args.sync.epoch});
  lay_out_gemm(args, map.rows * map.columns, true, work);
  const Range mine = own_rows(args);
  const auto is_own = [=](TileCoord tile) {
    const int begin = tile.m * kTileM;
    return begin >= mine.begin && min_of(begin + kTileM, args.m) <= mine.end;
  };
  work->open = [=](int unit, std::vector<Wait>* waits) {
    const TileCoord tile = tile_at(map, unit);
    const int begin = tile.m * kTileM;
    Range range = signals_of_rows(tiling, begin, min_of(begin + kTileM, args.m));
    if (is_own(tile)) range = {};
    if (pushes) {
      push_rows(args, pushing.get());
      if (unit == 0) range = {0, tiling.world};
    }
    for (int i = range.begin; args.signals != nullptr && i < range.end; ++i) {
      waits->push_back({args.signals, i, pushing->number, "signal", FLUX_WAIT_GATHER, tile.m});
    }
  };
  work->close = [=](int unit, const std::vector<bool>&, Place at) {
    const TileCoord tile = tile_at(map, unit);
    const std::uint64_t began = emulated::now();
    emulated::dawdle();
    FluxGemmArgs of_call = args;
    if (is_own(tile) || (pushes && pushing->number % 2 != 0)) {
      of_call.a = static_cast<const char*>(args.a) + other_rows(args, 2);
    }
    store_tile<C>(of_call, tile);
    emulated::tell(args.sync, began, FLUX_TRACE_TILE, tile.m, tile.n, 0, at);
  };
  return FLUX_OK;
}

std::mutex adding;  // memory adds element by element, whoever sends

template <class C>
void put_element(std::uint16_t* to, float value) {
  const std::lock_guard<std::mutex> hold(adding);
  *to = to_bf16(C::kInFlight ? to_float(*to) + value : value);
}

// Of the rows of an owner: see core/scatter.h.
TensorMap map_of(const ScatterTargets& to, int owner) {
  return {static_cast<std::uint16_t*>(to.slots[owner]) - kGuardRows * to.ld,
          map_rows(to.tiling, owner), to.tiling.n, to.ld};
}

template <class C>
void store_boxes(const FluxGemmArgs& args, const ScatterTargets& to, TileCoord tile, int owner) {
  for (int r = tile.m * kTileM; r < min_of(args.m, (tile.m + 1) * kTileM); r += kBoxRows) {
    const Range owners = owners_of_rows(args.m, to.tiling.world, r, r + kBoxRows);
    if (owner < owners.begin || owner >= owners.end) continue;
    for (int c = tile.n * kTileN; c < min_of(args.n, (tile.n + 1) * kTileN); c += kBoxColumns) {
      map_of(to, owner).store(
          map_row(to.tiling, owner, r), c, kBoxRows, kBoxColumns,
          [&](std::uint16_t* at, int row, int column) {
            put_element<C>(at, r + row < args.m ? dot<C>(args, r + row, c + column) : 0.0f);
          });
    }
  }
}

// Whether a box has rows in front of the first one of an owner.
bool straddles(const ScatterTiling& s) {
  for (int owner = 1; owner < s.world; ++owner) {
    const int first = row_begin(s.m, s.world, owner);
    if (row_count(s.m, s.world, owner) > 0 && first % kTileM % kBoxRows != 0) return true;
  }
  return false;
}

template <class C>
int make_gemm_rs(const FluxGemmArgs& args, Work* work) {
  const TileMap map = tile_map(tile_order(args, OpKind::kGemmRS, kTileM, kTileN));
  const ScatterTargets to = scatter_targets(args, kTileM, kTileN);
  const bool guarded = args.guard_rows >= kBoxRows - 1 || !straddles(to.tiling);
  if (!guarded || args.all_reduce.switch_in != nullptr) return FLUX_REFUSED;
  const int tiles = map.rows * map.columns;
  const bool ends = args.all_reduce.counts != nullptr || args.all_reduce.scatters != 0;
  const auto ending = std::make_shared<Ending>(Ending{sum_targets(args, kTileM, kTileN, 2)});
  lay_out_gemm(args, tiles, ends, work);
  if (ends) work->units += ending->units();
  work->open = [=](int unit, std::vector<Wait>* waits) {
    if (ends) ending->begin();
    if (unit >= tiles) return ending->open(unit - tiles, waits);
    const TileCoord tile = tile_at(map, unit);
    const Range owners = owners_of_tile(to.tiling, tile.m);
    const std::uint32_t epoch = to.sync.count != nullptr ? *to.sync.count : to.sync.epoch;
    for (int owner = owners.begin; to.entries != nullptr && owner < owners.end; ++owner) {
      waits->push_back({to.entries, owner, epoch, "entry", FLUX_WAIT_ENTRY, tile.m});
    }
  };
  work->close = [=](int unit, const std::vector<bool>& came, Place at) {
    if (unit >= tiles) {
      const bool complete = std::find(came.begin(), came.end(), false) == came.end();
      return ending->close(unit - tiles, complete, at);
    }
    const TileCoord tile = tile_at(map, unit);
    const Range owners = owners_of_tile(to.tiling, tile.m);
    const auto free = [&](int owner) {
      return !ending->silent && (came.empty() || came[owner - owners.begin]);
    };
    const std::uint64_t begin = emulated::now();
    emulated::dawdle();
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      if (free(owner)) store_boxes<C>(args, to, tile, owner);
    }
    emulated::tell(to.sync, begin, FLUX_TRACE_TILE, tile.m, tile.n, 0, at);
    const std::uint64_t stored = emulated::now();
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      if (!free(owner) || to.flags[owner] == nullptr) continue;
      emulated::store(to.flags[owner] + flag_index(to.tiling, to.rank, owner, tile.m, tile.n),
                      ends ? ending->number : to.sync.epoch);
    }
    emulated::tell(to.sync, stored, FLUX_TRACE_RELEASE, tile.m, tile.n, 0, at);
  };
  return FLUX_OK;
}

// What a rank has summed up goes to each rank that wants it.
// Sums that lack partials stay with their owner.
void put_sum(const FluxReduceArgs& args, std::int64_t at, std::uint16_t sum, bool complete) {
  const int own = args.out_count > 1 ? args.rank - args.first_source : 0;
  for (int out = 0; out < args.out_count; ++out) {
    if (!complete && out != own) continue;
    auto* const to = static_cast<std::uint16_t*>(args.outs[out]) + at;
    emulated::write(reinterpret_cast<std::uintptr_t>(to), &sum, sizeof(sum));
  }
}

float sum_of_sources(const FluxReduceArgs& args, std::int64_t at) {
  float sum = 0;
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
      put_sum(args, r * args.out_ld + c, to_bf16(sum), complete);
    }
  }
}

// A strip of a tile: rows of the owner, and columns.
struct Strip {
  int tile_row, column;
  Range rows;
};
Strip strip_at(const FluxReduceArgs& args, int unit) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const int strips = ceil_div(args.tile_m, kStripRows);
  const int tile_row = tiles_of_owner(s, args.rank).begin + unit / (flag_columns(s) * strips);
  const int first = tile_row * args.tile_m + unit % strips * kStripRows;
  const int last = min_of(first + kStripRows, (tile_row + 1) * args.tile_m);
  return {tile_row,
          unit / strips % flag_columns(s),
          {max_of(first - args.first_row, 0), min_of(last - args.first_row, args.rows)}};
}

// The last tile first: each must rely on its own flags, whatever order they are raised in.
int make_reduction(const FluxReduceArgs& args, Work* work) {
  if (args.switch_in != nullptr || args.switch_out != nullptr) return FLUX_REFUSED;
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const int units = args.rows == 0 ? 0 : reduce_units(args);
  work->footprint = kReduction;
  work->units = units;
  work->blocks = min_of(units, reduce_blocks(args));
  emulated::set_sync(args.sync, true, work);
  work->early = args.early != 0;
  work->open = [=](int unit, std::vector<Wait>* waits) {
    const Strip strip = strip_at(args, units - 1 - unit);
    if (strip.rows.begin >= strip.rows.end) return;
    for (int i = 0; args.flags != nullptr && i < args.source_count; ++i) {
      const int source = args.first_source + i;
      const int flag = args.by_source != 0
                           ? source
                           : flag_index(s, source, args.rank, strip.tile_row, strip.column);
      waits->push_back(
          {args.flags, flag, args.sync.epoch, "flag", FLUX_WAIT_PARTIAL, strip.tile_row});
    }
  };
  work->close = [=](int unit, const std::vector<bool>& came, Place at) {
    const Strip strip = strip_at(args, units - 1 - unit);
    if (strip.rows.begin >= strip.rows.end) return;
    const bool complete = std::find(came.begin(), came.end(), false) == came.end();
    const int first = strip.column * args.tile_n;
    const std::uint64_t begin = emulated::now();
    emulated::dawdle();
    sum_tile(args, strip.rows, {first, min_of(first + args.tile_n, args.n)}, complete);
    emulated::tell(args.sync, begin, FLUX_TRACE_SUM, args.first_row + strip.rows.begin,
                   strip.column, strip.rows.end - strip.rows.begin, at);
  };
  return FLUX_OK;
}

// What is done to one rank at a time, as the threads of the kernel's one block do it.
int make_meeting(const FluxMeetArgs& args, Work* work) {
  const auto number = std::make_shared<std::uint32_t>();
  const auto failed = std::make_shared<bool>();
  const int rows = max_of(args.rows, 1);
  const bool small = args.reset_count == 0 && args.awaited_count * rows <= 32;
  work->footprint = Footprint{small ? 32 : 256, 32, 0};
  emulated::set_sync(args.sync, false, work);
  work->open = [=](int, std::vector<Wait>* waits) {
    for (int i = 0; i < args.reset_count; ++i) emulated::store(args.reset + i, 0);
    *number = args.count != nullptr ? *args.count += args.advance : args.sync.epoch;
    emulated::dawdle();
    const std::uint64_t code = __atomic_load_n(args.sync.status, __ATOMIC_ACQUIRE);
    *failed = code != FLUX_WAIT_NONE;
    for (int rank = 0; !*failed && rank < args.world; ++rank) {
      if (args.raised[rank] != nullptr) emulated::store(args.raised[rank], *number);
    }
    for (int row = 0; args.awaited != nullptr && row < rows; ++row) {
      for (int i = 0; i < args.awaited_count; ++i) {
        const int word = args.first + row * args.row_step + i;
        waits->push_back({args.awaited, word, *number, "word", args.code, 0});
      }
    }
  };
  work->close = [=](int, const std::vector<bool>& came, Place) {
    if (!*failed && std::find(came.begin(), came.end(), false) == came.end()) return;
    for (int rank = 0; rank < args.world; ++rank) {
      if (rank == args.rank || args.statuses[rank] == nullptr) continue;
      args.statuses[rank][FLUX_STATUS_SIGNAL] = static_cast<std::uint64_t>(args.rank);
      args.statuses[rank][FLUX_STATUS_EXPECTED] = *number;
      __atomic_store_n(args.statuses[rank], std::uint64_t{FLUX_ABANDONED}, __ATOMIC_RELEASE);
    }
  };
  return FLUX_OK;
}

// -- behind the C ABI ------------------------------------------------------------------------------

template <Code* kCode, auto kMake, class Args>
int launch_as(const char* part, const Args& args, void* stream) {
  if (device().launches_refused) return FLUX_REFUSED;
  if (device().failed() || !kCode->load()) return emulated::kLaunchFailure;
  std::this_thread::sleep_for(std::chrono::microseconds(device().launch_us));
  Work work;
  work.name = std::string(kCode->name) + part;
  const int status = kMake(args, &work);
  if (status != FLUX_OK || work.blocks == 0) return status;
  return emulated::stream_of(stream)->launch(std::move(work));
}

template <Code* kCode, auto kMake>
int launch(const FluxGemmArgs* args, void* stream) {
  return launch_as<kCode, kMake>("", *args, stream);
}
// Kernels of other builds do not look at the trace.
template <Code* kCode, auto kMake>
int launch_untraced(const FluxGemmArgs* args, void* stream) {
  FluxGemmArgs blind = *args;
  blind.sync.trace = nullptr;
  return launch_as<kCode, kMake>("", blind, stream);
}
template <Code* kCode>
int meet(const FluxMeetArgs* args, void* stream) {
  return launch_as<kCode, make_meeting>(" meet", *args, stream);
}
template <Code* kCode>
int reduce(const FluxReduceArgs* args, void* stream) {
  return launch_as<kCode, make_reduction>(" reduce", *args, stream);
}
template <Code* kCode>
constexpr int (*reduction)(const FluxReduceArgs*, void*) = &reduce<kCode>;
template <Code* kCode>
constexpr int (*no_reduction)(const FluxReduceArgs*, void*) = nullptr;
int collect(const FluxCollectArgs* args, void* stream) {
  emulated::Item item;
  item.what = "collect";
  item.run = [given = *args] {
    const bool odd = given.counts[FLUX_GATHER_CALLS] % 2 != 0;
    const char* from = static_cast<const char*>(given.rows) + (odd ? given.odd : 0);
    emulated::write(reinterpret_cast<std::uintptr_t>(given.out), from, given.bytes);
  };
  emulated::stream_of(stream)->put(std::move(item));
  return FLUX_OK;
}
std::uint64_t no_workspace(const FluxGemmArgs*) { return 0; }
template <Code* kCode>
int prepare(int) {
  return kCode->load() ? FLUX_OK : emulated::kLaunchFailure;
}
int stamp(std::uint64_t* times, std::int32_t count, void* stream) {
  emulated::Item item;
  item.what = "stamp";
  item.run = [=] { emulated::stamp(times, count); };
  emulated::stream_of(stream)->put(std::move(item));
  return FLUX_OK;
}

}  // namespace

extern "C" {

// Stores a box of ones through a tensor map, as a kernel does.
void emulator_store_box(void* stream, std::uint16_t* base, int rows, int columns, int row,
                        int column) {
  Work work;
  work.name = "store of a box";
  work.close = [=](int, const std::vector<bool>&, Place) {
    const auto put = [](std::uint16_t* at, int, int) { *at = to_bf16(1.0f); };
    TensorMap{base, rows, columns, columns}.store(row, column, kBoxRows, kBoxColumns, put);
  };
  work.open = [](int, std::vector<Wait>*) {};
  emulated::stream_of(stream)->launch(std::move(work));
}

#define EMULATED(symbol, version, reduces, ...)                                           \
  static Code symbol##_code{#symbol};                                                     \
  extern const FluxKernel symbol = {version,                                              \
                                    sizeof(FluxGemmArgs),                                 \
                                    #symbol,                                              \
                                    kTileM,                                               \
                                    kTileN,                                               \
                                    &no_workspace,                                        \
                                    &prepare<&symbol##_code>,                             \
                                    &launch_untraced<&symbol##_code, __VA_ARGS__>,        \
                                    &meet<&symbol##_code>,                                \
                                    reduces<&symbol##_code>,                              \
                                    &collect,                                             \
                                    nullptr};                                             \
  static Code symbol##_traced_code{#symbol "_traced"};                                    \
  extern const FluxKernel symbol##_traced = {version,                                     \
                                             sizeof(FluxGemmArgs),                        \
                                             #symbol "_traced",                           \
                                             kTileM,                                      \
                                             kTileN,                                      \
                                             &no_workspace,                               \
                                             &prepare<&symbol##_traced_code>,             \
                                             &launch<&symbol##_traced_code, __VA_ARGS__>, \
                                             &meet<&symbol##_traced_code>,                \
                                             reduces<&symbol##_traced_code>,              \
                                             &collect,                                    \
                                             &stamp};
#define EMULATED_AG(suffix, ...)                                          \
  EMULATED(flux_emulated_ag_gemm##suffix, FLUX_ABI_VERSION, no_reduction, \
           make_ag_gemm<Config<__VA_ARGS__>>)
#define EMULATED_RS(suffix, ...)                                       \
  EMULATED(flux_emulated_gemm_rs##suffix, FLUX_ABI_VERSION, reduction, \
           make_gemm_rs<Config<__VA_ARGS__>>)

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
EMULATED(flux_emulated_old, FLUX_ABI_VERSION + 1, no_reduction, make_ag_gemm<Config<std::uint16_t>>)

}  // extern "C"
