// A GPU that does nothing and writes everything down: the entry points of the CUDA driver that flux
// looks up, and kernels behind the C ABI. What the CUDA backend puts on streams becomes a list of
// records, from which the model checker makes its programs, so that it checks the host code itself and
// no copy of it. A launch is unrolled into the waits, reads, writes and flags of its tiles, by the
// functions of csrc/core that the kernels call.
#include <cstdint>

#include "cuda/arguments.h"
#include "gpu/batch_op.h"
#include "multicast.h"
#include "recording_sums.h"
#include "records.h"

namespace {

using namespace flux;

// As csrc/cuda/gather.cuh: one tile pushes, and awaits the words of all ranks. It counts for real. Returns
// the number of the call.
std::uint32_t record_pushes(const FluxGemmArgs& args, const CommTiling& tiling, void* stream) {
  const FluxGather& g = args.gather;
  const std::uint32_t number = g.counts[FLUX_GATHER_CALLS] + 1;
  const Tile tile{stream, number, 0};
  const int rank = args.order.rank;
  const int elements = static_cast<int>(g.bytes / kElement);
  std::vector<void*> places(g.to, g.to + tiling.world);
  if (g.everywhere != nullptr) places = everywhere(g.everywhere);
  for (void* place : places) {
    if (g.first == 0 || elements == 0) break;
    tile.touch(kRead, g.rows, elements, kX, rank, 0);
    char* to = static_cast<char*>(place) + (number % 2 != 0 ? g.odd : 0);
    tile.touch(kWrite, to, elements, kX, rank, 0);
  }
  for (int peer = 0; g.first != 0 && peer < tiling.world; ++peer) {
    tile.word(kRaise, g.raised[peer], 0);
  }
  for (int peer = 0; peer < tiling.world; ++peer) tile.word(kAwait, args.signals, peer);
  if (g.last != 0) g.counts[FLUX_GATHER_CALLS] = number;
  return number;
}

int record_ag_gemm(const FluxGemmArgs* args, void* stream) {
  add(kLaunch, stream);
  const TileMap map = tile_map(tile_order(*args, OpKind::kAGGemm, kTileM, kTileN));
  const CommTiling tiling = comm_tiling(*args);
  const bool pushes = args->gather.counts != nullptr;
  const std::uint32_t number = pushes ? record_pushes(*args, tiling, stream) : args->sync.epoch;
  const void* a =
      pushes && number % 2 != 0 ? static_cast<const char*>(args->a) + args->gather.odd : args->a;
  for (int slot = 0; slot < map.rows * map.columns; ++slot) {
    const Tile tile{stream, number, slot + (pushes ? 1 : 0)};
    const TileCoord at = tile_at(map, slot);
    const int begin = at.m * kTileM;
    const int end = min_of(begin + kTileM, args->m);
    const bool own = begin >= own_rows(*args).begin && end <= own_rows(*args).end;
    const void* from = own ? element(args->a, other_rows(*args, kElement) / kElement) : a;
    const Range waits = own ? Range{} : signals_of_rows(tiling, begin, end);
    for (int i = waits.begin; args->signals != nullptr && i < waits.end; ++i) {
      tile.word(kAwait, args->signals, i);
    }
    for (int row = begin; row < end; ++row) {
      // A GEMM of one chunk has its number, since the ops here have one weight.
      const bool split = args->signals == nullptr;
      const int owner =
          split ? static_cast<int>(args->sync.launch) : owner_of(args->m, tiling.world, row);
      tile.touch(
          kRead, element(from, row * args->lda), args->k, kX, owner,
          static_cast<std::int64_t>(row - (split ? 0 : row_begin(args->m, tiling.world, owner))) *
              args->k);
    }
    const int column = at.n * kTileN;
    for (int row = begin; row < end; ++row) {
      const std::int64_t above = args->signals == nullptr
                                     ? args->sync.launch * args->order.comm_tile_rows
                                     : 0;  // rows of other chunks
      const std::int64_t first = (above + row) * args->n + column;
      tile.touch(kWrite, element(args->d, row * args->ldd + column),
                 min_of(kTileN, args->n - column), kOutput, call_rank, first);
    }
  }
  return FLUX_OK;
}

// As csrc/cuda/gemm/all_reduce.cuh: behind the tiles come the sums, then the copies. It counts for real.
void record_sums(const FluxGemmArgs& args, const SumTargets& s, Tile tile) {
  const ScatterTiling& t = s.tiling;
  const int sums = sum_count(t, s.rank), first_own = row_begin(t.m, t.world, s.rank);
  const auto width = [&](int column) { return min_of(kTileN, args.n - column * kTileN); };
  for (int i = 0; i < sums; ++i, ++tile.number) {
    const Piece piece = sum_of_owner(t, s.rank, i);
    const int column = piece.column * kTileN;
    for (int source = 0; source < t.world; ++source) {
      tile.word(kAwait, s.to.words,
                flag_index(t, source, s.rank, piece.begin / t.tile_m, piece.column));
    }
    for (int row = piece.begin; row < piece.end; ++row) {
      const std::int64_t number = static_cast<std::int64_t>(row) * args.n + column;
      const auto partials = sources_of(s.to.partials, t.world, s.to.switch_in);
      for (int source = 0; source < t.world; ++source) {
        tile.touch(kRead, element(partials[source], (row - first_own) * s.ld + column),
                   width(piece.column), kPartial, source, number);
      }
      std::vector<void*> outs(s.to.outs, s.to.outs + t.world);
      if (s.to.switch_out != nullptr) {
        outs = everywhere(s.to.switch_out);
        outs.push_back(s.to.outs[s.rank]);
      }
      for (void* out : outs) {
        tile.touch(kWrite, element(out, number), width(piece.column), kResult, s.rank, number);
      }
    }
    for (int rank = 0; rank < t.world; ++rank) {
      if (rank != s.rank)
        tile.word(kRaise, s.to.sums[rank], sum_word(t, piece.begin, piece.column));
    }
  }
  for (int i = 0; i < copy_count(t); ++i, ++tile.number) {
    const Piece piece = copied_piece(t, i);
    const auto is_own = [&](int row) { return owner_of(t.m, t.world, row) == s.rank; };
    for (int row = piece.begin; row < piece.end; ++row) {
      if (begins_sum(t, row) && !is_own(row))
        tile.word(kAwait, s.to.sums[s.rank], sum_word(t, row, piece.column));
    }
    for (int row = piece.begin; row < piece.end; ++row) {
      if (is_own(row)) continue;
      const std::int64_t number = static_cast<std::int64_t>(row) * args.n + piece.column * kTileN;
      const int owner = owner_of(t.m, t.world, row);
      for (const Kind kind : {kRead, kWrite}) {
        const void* at = kind == kRead ? s.to.put : s.to.outs[s.rank];
        tile.touch(kind, element(at, number), width(piece.column), kResult, owner, number);
      }
    }
  }
  s.to.counts[FLUX_SUM_CALLS] = tile.epoch;
}

// The sums of a ReduceScatter's kernel: a strip is a unit beside the tiles.
void record_own_sums(const FluxGemmArgs& args, const SumTargets& s, Tile tile) {
  const ScatterTiling& t = s.tiling;
  const int first_own = row_begin(t.m, t.world, s.rank);
  for (int i = 0; i < own_sum_count(t, s.rank); ++i, ++tile.number) {
    const Piece strip = own_sum(t, s.rank, s.raster, i);
    const int column = strip.column * kTileN, width = min_of(kTileN, args.n - column);
    for (int source = 0; strip.begin < strip.end && source < t.world; ++source) {
      tile.word(kAwait, s.to.words,
                flag_index(t, source, s.rank, strip.begin / t.tile_m, strip.column));
    }
    for (int row = strip.begin; row < strip.end; ++row) {
      const std::int64_t number = static_cast<std::int64_t>(row) * args.n + column;
      for (int source = 0; source < t.world; ++source) {
        tile.touch(kRead, element(s.to.partials[source], (row - first_own) * s.ld + column), width,
                   kPartial, source, number);
      }
      const std::int64_t place = static_cast<std::int64_t>(row - first_own) * args.n + column;
      tile.touch(kWrite, element(s.to.outs[s.rank], place), width, kResult, s.rank, number);
    }
  }
}

int record_gemm_rs(const FluxGemmArgs* args, void* stream) {
  gemm_launch = records.size();
  add(kLaunch, stream);
  const TileMap map = tile_map(tile_order(*args, OpKind::kGemmRS, kTileM, kTileN));
  const ScatterTargets to = scatter_targets(*args, kTileM, kTileN);
  const SumTargets sums = sum_targets(*args, kTileM, kTileN, kElement);
  const bool scatters = sums.to.scatters != 0;
  const std::uint32_t* counts = scatters ? nullptr : sums.to.counts;
  const std::uint32_t number = counts != nullptr ? counts[FLUX_SUM_CALLS] + 1 : args->sync.epoch;
  // The GEMM of one owner's rows has that as its number, since the ops here have one weight.
  const bool split = args->order.world <= 1;
  const int above = split ? args->sync.launch * args->order.comm_tile_rows : 0;
  const int source = split ? call_rank : to.rank;
  for (int slot = 0; slot < map.rows * map.columns; ++slot) {
    const Tile tile{stream, number, slot};
    const TileCoord at = tile_at(map, slot);
    const int begin = at.m * kTileM;
    const int end = min_of(begin + kTileM, args->m);
    const Range owners = owners_of_tile(to.tiling, at.m);
    for (int row = begin; row < end; ++row) {
      tile.touch(kRead, element(args->a, row * args->lda), args->k, kX, source,
                 static_cast<std::int64_t>(above + row) * args->k);
    }
    const Tile entering{stream, to.sync.count != nullptr ? *to.sync.count : to.sync.epoch, slot};
    for (int owner = owners.begin; to.entries != nullptr && owner < owners.end; ++owner) {
      entering.word(kAwait, to.entries, owner);
    }
    const int column = at.n * kTileN;
    for (int row = begin; row < end; ++row) {
      const int owner = owner_of(args->m, to.tiling.world, row);
      const std::int64_t local = row - row_begin(args->m, to.tiling.world, owner);
      tile.touch(kWrite, element(to.slots[owner], local * to.ld + column),
                 min_of(kTileN, args->n - column), kPartial, source,
                 static_cast<std::int64_t>(above + row) * args->n + column);
    }
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      if (to.flags[owner] == nullptr) continue;
      tile.word(kRaise, to.flags[owner], flag_index(to.tiling, to.rank, owner, at.m, at.n));
    }
  }
  if (counts != nullptr) record_sums(*args, sums, {stream, number, map.rows * map.columns});
  if (scatters) record_own_sums(*args, sums, {stream, number, map.rows * map.columns});
  return FLUX_OK;
}

int record_collect(const FluxCollectArgs* args, void* stream) {
  const bool odd = args->counts[FLUX_GATHER_CALLS] % 2 != 0;
  Record& copy = add(kCopy, stream, args->out);
  copy.from = reinterpret_cast<std::uint64_t>(args->rows) + (odd ? args->odd : 0);
  copy.bytes = args->bytes;
  return FLUX_OK;
}

// The block's resets, a barrier, and then a thread for each rank. It counts for real.
int record_meet(const FluxMeetArgs* args, void* stream) {
  const std::uint32_t number =
      args->count != nullptr ? * args->count += args->advance : args->sync.epoch;
  add(kLaunch, stream);
  for (int i = 0; i < args->reset_count; ++i) Tile{stream, 0, 0}.word(kReset, args->reset, i);
  add(kLaunch, stream);
  const int waits = args->awaited != nullptr ? args->awaited_count * max_of(args->rows, 1) : 0;
  for (int i = 0; i < max_of(args->world, waits); ++i) {
    const Tile thread{stream, number, i};
    if (i < args->world && args->raised[i] != nullptr) thread.word(kRaise, args->raised[i], 0);
    if (i >= waits) continue;
    const int row = i / args->awaited_count;
    const int word = args->first + row * args->row_step + i % args->awaited_count;
    thread.word(kAwait, args->awaited, word);
  }
  return FLUX_OK;
}

std::uint64_t no_workspace(const FluxGemmArgs*) { return 0; }
int prepare(int) { return FLUX_OK; }

}  // namespace

extern "C" {

extern const FluxKernel flux_emulated_ag_gemm_nk = {FLUX_ABI_VERSION,
                                                    sizeof(FluxGemmArgs),
                                                    "flux_emulated_ag_gemm_nk",
                                                    kTileM,
                                                    kTileN,
                                                    &no_workspace,
                                                    &prepare,
                                                    &record_ag_gemm,
                                                    &record_meet,
                                                    nullptr,
                                                    &record_collect,
                                                    nullptr};
extern const FluxKernel flux_emulated_gemm_rs_nk = {FLUX_ABI_VERSION,
                                                    sizeof(FluxGemmArgs),
                                                    "flux_emulated_gemm_rs_nk",
                                                    kTileM,
                                                    kTileN,
                                                    &no_workspace,
                                                    &prepare,
                                                    &record_gemm_rs,
                                                    &record_meet,
                                                    &record_reduce,
                                                    &record_collect,
                                                    nullptr};

int recorder_put_signal(void* to, const void* from, std::uint64_t bytes, std::uint64_t* word,
                        std::uint64_t value, int pe, void* stream) {
  return record_put(to, from, bytes, word, value, pe, stream);
}
int recorder_signal(std::uint64_t* word, std::uint64_t value, int pe, void* stream) {
  return record_signal(word, value, pe, stream);
}
int recorder_relay(const FluxRelayArgs* args, void* stream) { return record_relay(args, stream); }
int recorder_node_sum(const FluxNodeSumArgs* args, void* stream) {
  return record_node_sum(args, stream);
}
void recorder_heaps(int ranks, const std::uintptr_t* begins, std::size_t bytes) {
  add_heaps(ranks, begins, bytes);
}
std::size_t recorder_invented() { return invented.size(); }
std::uint64_t recorder_invented_stream(std::size_t i, int* rank) {
  *rank = invented[i].rank;
  return invented[i].stream;
}

std::size_t recorder_count() { return records.size(); }
const Record* recorder_records() { return records.data(); }
std::size_t recorder_record_bytes() { return sizeof(Record); }
void recorder_clear() {
  records.clear();
  invented.clear();
  no_call_yet = true;
}
void recorder_begin_call(int rank, std::uint32_t epoch, std::uint64_t of_capture) {
  call_rank = rank;
  if (no_call_yet) first_epoch = epoch;
  no_call_yet = false;
  call_epoch = epoch;
  capture = of_capture;
}

int cuGetErrorString(int, const char** text) {
  *text = "no failure";
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new int;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  delete static_cast<int*>(stream);
  return 0;
}
int cuStreamSynchronize(void*) { return 0; }
int cuStreamQuery(void*) { return 0; }
// An event holds the number of its last record: events are recorded anew, and their memory is reused.
int cuEventCreate(void** event, unsigned) {
  *event = new std::uint32_t(0);
  return 0;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<std::uint32_t*>(event);
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  *static_cast<std::uint32_t*>(event) = ++events;
  add(kEvent, stream, nullptr, events);
  return 0;
}
int cuEventQuery(void*) { return 600; }  // not yet: nothing runs here
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuEventElapsedTime(float*, void*, void*) { return 1; }  // nobody traces here
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  add(kJoin, stream, nullptr, *static_cast<std::uint32_t*>(event));
  return 0;
}
int cuMemcpyAsync(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, void* stream) {
  Record& r = add(kCopy, stream, reinterpret_cast<void*>(to));
  r.from = from;
  r.bytes = bytes;
  return 0;
}
int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  for (std::size_t row = 0; row < copy->height; ++row) {
    cuMemcpyAsync(copy->to + row * copy->to_pitch, copy->from + row * copy->from_pitch, copy->width,
                  stream);
  }
  return 0;
}
int cuStreamWriteValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  add(kRaise, stream, reinterpret_cast<void*>(word), value);
  return 0;
}
int cuStreamWaitValue32_v2(void* stream, std::uintptr_t word, std::uint32_t value, unsigned) {
  add(kAwait, stream, reinterpret_cast<void*>(word), value);
  return 0;
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const BatchOp* ops, unsigned) {
  return one_by_one(stream, count, ops, &cuStreamWaitValue32_v2, &cuStreamWriteValue32_v2);
}
int cuStreamGetCaptureInfo_v2(void*, int* status, std::uint64_t* id, void**, const void**,
                              std::size_t*) {
  *status = capture != 0 ? 1 : 0;
  *id = capture;
  return 0;
}
int cuMemsetD32Async(std::uintptr_t words, unsigned value, std::size_t count, void* stream) {
  add(kFill, stream, reinterpret_cast<void*>(words), value).bytes = 4 * count;
  return 0;
}

}  // extern "C"
