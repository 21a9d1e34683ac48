// A GPU that does nothing and writes everything down: the entry points of the CUDA driver that flux
// looks up, and kernels behind the C ABI. What the CUDA backend puts on streams becomes a list of
// records, from which the model checker makes its programs, so that it checks the host code itself and
// no copy of it. A launch is unrolled into the waits, reads, writes and flags of its tiles, by the
// functions of csrc/core that the kernels call.
#include <cstdint>
#include <vector>

#include "core/relay.h"
#include "cuda/arguments.h"
#include "cuda/runtime/nvshmem_abi.h"
#include "gpu/batch_op.h"
#include "multicast.h"
#include "nvshmem/heaps.h"

namespace {

using namespace flux;

// recording.py has the same lists.
enum Kind : std::int32_t {
  kCopy,    // bytes from `from` to `at`
  kFill,    // bytes at `at` with `value`
  kRaise,   // word `at` becomes `value`
  kAwait,   // until word `at` has reached `value`
  kEvent,   // event number `value` is recorded
  kJoin,    // until event number `value` has come
  kLaunch,  // a kernel begins; what follows with tile >= 0 belongs to it
  kRead,    // of `bytes` at `at`, which should be `what` of rank `source`, from byte `offset` on
  kWrite,   // in the same way
  kReset    // word `at` becomes 0 again
};
// Contents, each a matrix without gaps. Rows of x count from the first of the rank that has them.
// A sum is what the ranks of a node, of which `source` is the first, have for the rows of another.
enum What : std::int32_t { kNothing, kX, kPartial, kResult, kOutput, kSum };

struct Record {
  std::int32_t kind;
  std::int32_t tile;  // -1: an operation of the stream itself
  std::int32_t what;
  std::int32_t source;
  std::uint64_t stream;
  std::uint64_t at;
  std::uint64_t from;
  std::uint64_t bytes;
  std::uint64_t offset;
  std::uint32_t value;  // with a read or a write: the epoch of what it is
  std::uint32_t pad;
};

std::vector<Record> records;
std::uint32_t events = 0;
std::uint32_t call_epoch = 0;  // by which contents are told apart
int call_rank = 0;             // whose call it is
std::uint32_t first_epoch = 0;
bool no_call_yet = true;
std::uint64_t capture = 0;  // that calls belong to; 0: none

Record& add(Kind kind, const void* stream, const void* at = nullptr, std::uint32_t value = 0) {
  Record r{};
  r.kind = kind;
  r.tile = -1;
  r.stream = reinterpret_cast<std::uint64_t>(stream);
  r.at = reinterpret_cast<std::uint64_t>(at);
  r.value = value;
  records.push_back(r);
  return records.back();
}

// -- kernels ---------------------------------------------------------------------------------------

constexpr int kTileM = 2;
constexpr int kTileN = 8;
constexpr std::uint64_t kElement = 2;  // bytes

// The records of one tile.
struct Tile {
  const void* stream;
  std::uint32_t epoch;
  int number;

  template <class Word>
  void word(Kind kind, const Word* words, int index) const {
    add(kind, stream, words + index, epoch).tile = number;
  }
  // `elements` at `at`; `first` is the number of the first one in the matrix that they belong to.
  void touch(Kind kind, const void* at, int elements, What what, int source,
             std::int64_t first) const {
    Record& r = add(kind, stream, at, call_epoch);
    r.tile = number;
    r.what = what;
    r.source = source;
    r.bytes = elements * kElement;
    r.offset = first * kElement;
  }
};

template <class Element>
Element* element(Element* base, std::int64_t at) {
  using Byte = std::conditional_t<std::is_const_v<Element>, const char, char>;
  return static_cast<Element*>(static_cast<Byte*>(base) + at * kElement);
}

// As csrc/cuda/gather.cuh: one tile pushes, and awaits the words of all ranks. It counts for real. Returns
// the number of the call.
std::uint32_t record_pushes(const FluxGemmArgs& args, const CommTiling& tiling, void* stream) {
  const FluxGather& g = args.gather;
  const std::uint32_t number = g.counts[FLUX_GATHER_CALLS] + 1;
  const Tile tile{stream, number, 0};
  const int rank = args.order.rank;
  const int elements = static_cast<int>(g.bytes / kElement);
  for (int peer = 0; g.first != 0 && peer < tiling.world; ++peer) {
    if (elements == 0) break;
    tile.touch(kRead, g.rows, elements, kX, rank, 0);
    char* to = static_cast<char*>(g.to[peer]) + (number % 2 != 0 ? g.odd : 0);
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
    const Range waits = signals_of_rows(tiling, begin, end);
    for (int i = waits.begin; args->signals != nullptr && i < waits.end; ++i) {
      tile.word(kAwait, args->signals, i);
    }
    for (int row = begin; row < end; ++row) {
      // A GEMM of one chunk has its number, since the ops here have one weight.
      const bool split = args->signals == nullptr;
      const int owner =
          split ? static_cast<int>(args->sync.launch) : owner_of(args->m, tiling.world, row);
      tile.touch(
          kRead, element(a, row * args->lda), args->k, kX, owner,
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
      for (int source = 0; source < t.world; ++source) {
        tile.touch(kRead, element(s.to.partials[source], (row - first_own) * s.ld + column),
                   width(piece.column), kPartial, source, number);
      }
      for (int rank = 0; rank < t.world; ++rank) {
        tile.touch(kWrite, element(s.to.outs[rank], number), width(piece.column), kResult, s.rank,
                   number);
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

std::size_t gemm_launch = 0;  // record of the last launch of a scattering GEMM

int record_gemm_rs(const FluxGemmArgs* args, void* stream) {
  gemm_launch = records.size();
  add(kLaunch, stream);
  const TileMap map = tile_map(tile_order(*args, OpKind::kGemmRS, kTileM, kTileN));
  const ScatterTargets to = scatter_targets(*args, kTileM, kTileN);
  const SumTargets sums = sum_targets(*args, kTileM, kTileN, kElement);
  const std::uint32_t* counts = sums.to.counts;
  const std::uint32_t number = counts != nullptr ? counts[FLUX_SUM_CALLS] + 1 : args->sync.epoch;
  for (int slot = 0; slot < map.rows * map.columns; ++slot) {
    const Tile tile{stream, number, slot};
    const TileCoord at = tile_at(map, slot);
    const int begin = at.m * kTileM;
    const int end = min_of(begin + kTileM, args->m);
    const Range owners = owners_of_tile(to.tiling, at.m);
    for (int row = begin; row < end; ++row) {
      tile.touch(kRead, element(args->a, row * args->lda), args->k, kX, to.rank,
                 static_cast<std::int64_t>(row) * args->k);
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
                 min_of(kTileN, args->n - column), kPartial, to.rank,
                 static_cast<std::int64_t>(row) * args->n + column);
    }
    for (int owner = owners.begin; owner < owners.end; ++owner) {
      tile.word(kRaise, to.flags[owner], flag_index(to.tiling, to.rank, owner, at.m, at.n));
    }
  }
  if (counts != nullptr) record_sums(*args, sums, {stream, number, map.rows * map.columns});
  return FLUX_OK;
}

std::vector<const void*> sources_of(const FluxReduceArgs& args) {
  if (args.switch_in == nullptr)
    return std::vector<const void*>(args.slots, args.slots + args.slot_count);
  std::vector<const void*> found;
  for (auto* at : everywhere(static_cast<const char*>(args.switch_in))) found.push_back(at);
  return found;
}
std::vector<void*> outs_of(const FluxReduceArgs& args) {
  if (args.switch_out == nullptr) return std::vector<void*>(args.outs, args.outs + args.out_count);
  std::vector<void*> found;
  for (auto* at : everywhere(static_cast<char*>(args.switch_out))) found.push_back(at);
  return found;
}

// What a slot of a reduction holds: partials of this node's ranks, in between sums of other nodes, as
// csrc/cuda_host/cuda_op_nodes.cpp lists them. Nodes of one rank have no sums.
struct Held {
  What what;
  int source;
};
Held held_in(const FluxReduceArgs& args, int slot, bool relayed) {
  const int lanes = args.source_count, node = args.first_source / lanes;
  const bool all = args.slot_count > lanes;
  if (!all || (slot >= node && slot < node + lanes)) {
    return {kPartial, args.first_source + slot - (all ? node : 0)};
  }
  const int other = slot < node ? slot : slot - lanes + 1;
  return {lanes > 1 || relayed ? kSum : kPartial, other * lanes};
}

// Rows [begin, end) of one column of tiles, summed. Sums for other nodes are told by their first rank.
void sum_rows(const FluxReduceArgs& args, const Tile& tile, Range rows, int column, bool relayed) {
  const int last = args.first_source + args.source_count;
  const bool own = args.rank >= args.first_source && args.rank < last;
  const int first = column * kTileN, width = min_of(kTileN, args.n - first);
  for (int row = rows.begin; row < rows.end; ++row) {
    const std::int64_t local = row - args.first_row;
    const std::int64_t number = static_cast<std::int64_t>(row) * args.n + first;
    const auto sources = sources_of(args);
    for (int slot = 0; slot < static_cast<int>(sources.size()); ++slot) {
      const Held held = held_in(args, slot, relayed);
      tile.touch(kRead, element(sources[slot], local * args.slot_ld + first), width, held.what,
                 held.source, number);
    }
    for (void* out : outs_of(args)) {
      tile.touch(kWrite, element(out, local * args.out_ld + first), width, own ? kResult : kSum,
                 own ? args.rank : args.first_source, number);
    }
  }
}

// A kernel, or the device, does something beside a stream when it pleases: a thread of its own, for which
// a stream is invented.
struct Invented {
  std::uint64_t stream;
  int rank;
};
std::vector<Invented> invented;

void* invent(int rank) {
  auto* stream = new int;
  invented.push_back({reinterpret_cast<std::uint64_t>(stream), rank});
  return stream;
}

int record_sums(const FluxReduceArgs* args, void* stream);

// An early reduction runs beside its GEMM: it begins behind what is ahead of that on the stream, which goes
// on when both are done.
int record_reduce(const FluxReduceArgs* args, void* stream) {
  if (args->rows == 0) return FLUX_OK;
  if (args->early == 0) return record_sums(args, stream);
  void* beside = invent(args->rank);
  add(kEvent, stream, nullptr, ++events);
  const Record begin = records.back();
  records.pop_back();
  records.insert(records.begin() + static_cast<std::ptrdiff_t>(gemm_launch), begin);
  add(kJoin, beside, nullptr, events);
  record_sums(args, beside);
  add(kEvent, beside, nullptr, ++events);
  add(kJoin, stream, nullptr, events);
  return FLUX_OK;
}

int record_sums(const FluxReduceArgs* args, void* stream) {
  add(kLaunch, stream);
  const int last = args->first_source + args->source_count;
  const ScatterTiling s{args->m, args->n, args->world, args->tile_m, args->tile_n};
  const Range tiles = tiles_of_owner(s, args->rank);
  const int columns = flag_columns(s);
  for (int unit = 0; unit < (tiles.end - tiles.begin) * columns; ++unit) {
    const Tile tile{stream, args->sync.epoch, unit};
    const int tile_row = tiles.begin + unit / columns;
    const int begin = max_of(tile_row * kTileM, args->first_row);
    const int end = min_of((tile_row + 1) * kTileM, args->first_row + args->rows);
    if (begin >= end) continue;
    for (int source = args->first_source; source < last; ++source) {
      tile.word(kAwait, args->flags, flag_index(s, source, args->rank, tile_row, unit % columns));
    }
    sum_rows(*args, tile, {begin, end}, unit % columns, false);
  }
  return FLUX_OK;
}

// -- NVSHMEM ---------------------------------------------------------------------------------------

// A put that a kernel has begun is made beside it. It begins when the kernel has raised a word that is
// invented as well.
void put(const Tile& tile, int rank, int pe, const char* from, char* to, std::uint64_t bytes,
         std::uint64_t* word) {
  // One for each put, and never given back: addresses tell words apart. All of them begin at the epoch
  // before the first, whatever the epoch of the put.
  auto* begun = new std::uint32_t(0);
  Tile{tile.stream, first_epoch, tile.number}.word(kRaise, begun, 0);
  const void* stream = invent(rank);
  add(kAwait, stream, begun, first_epoch);
  Record& copy = add(kCopy, stream, at_rank(to, pe));
  copy.from = reinterpret_cast<std::uint64_t>(from);
  copy.bytes = bytes;
  add(kRaise, stream, at_rank(word, pe), tile.epoch);
}

// As csrc/cuda/runtime/relay.cuh; a strip is a row of tiles here.
void relay_strip(const FluxRelayArgs& args, const Tile& tile, int place, int index) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const int owner = args.owners[place], first = row_begin(s.m, s.world, owner);
  const Strip strip = strip_of_owner(s, owner, index);
  if (strip.begin >= strip.end) return;
  tile.word(kAwait, args.entries, owner);
  for (int i = 0; i < args.source_count * flag_columns(s); ++i) {
    const int source = args.sources[i / flag_columns(s)];
    tile.word(kAwait, args.flags[place],
              flag_index(s, source, owner, strip.tile_row, i % flag_columns(s)));
  }
  const auto row_of = [&](const void* rows, int row) {
    return static_cast<const char*>(rows) + static_cast<std::int64_t>(row - first) * s.n * kElement;
  };
  for (int row = strip.begin; row < strip.end; ++row) {
    const std::int64_t number = static_cast<std::int64_t>(row) * s.n;
    for (int i = 0; i < args.source_count; ++i) {
      tile.touch(kRead, row_of(args.slots[place], row) + i * args.slot_bytes, s.n, kPartial,
                 args.sources[i], number);
    }
    tile.touch(kWrite, row_of(args.staging[place], row), s.n, kSum, args.sources[0], number);
  }
  const auto lane = static_cast<int>(owner % args.source_count);
  put(tile, args.sources[lane], owner, row_of(args.staging[place], strip.begin),
      const_cast<char*>(row_of(args.to[place], strip.begin)),
      static_cast<std::uint64_t>(strip.end - strip.begin) * s.n * kElement,
      args.words[place] + index);
}

int record_relay(const FluxRelayArgs* args, void* stream) {
  add(kLaunch, stream);
  const ScatterTiling s{args->m, args->n, args->world, args->tile_m, args->tile_n};
  int number = 0;
  for (int place = 0; place < args->owner_count; ++place) {
    for (int index = 0; index < strips_of_owner(s, args->owners[place]); ++index) {
      relay_strip(*args, Tile{stream, args->sync.epoch, number++}, place, index);
    }
  }
  return FLUX_OK;
}

int record_node_sum(const FluxNodeSumArgs* args, void* stream) {
  const FluxReduceArgs& sum = args->sum;
  add(kLaunch, stream);
  const ScatterTiling s{sum.m, sum.n, sum.world, sum.tile_m, sum.tile_n};
  for (int unit = 0; unit < strips_of_owner(s, sum.rank) * flag_columns(s); ++unit) {
    const int index = unit / flag_columns(s), column = unit % flag_columns(s);
    const Strip strip = strip_of_owner(s, sum.rank, index);
    if (strip.begin >= strip.end) continue;
    const Tile tile{stream, sum.sync.epoch, unit};
    for (int i = 0; i < args->source_count; ++i) {
      tile.word(kAwait, sum.flags,
                flag_index(s, args->sources[i], sum.rank, strip.tile_row, column));
    }
    for (int node = 0; node < args->node_count; ++node) {
      tile.word(kAwait, args->words[node], index);
    }
    sum_rows(sum, tile, {strip.begin, strip.end}, column, true);
  }
  return FLUX_OK;
}

// On a stream: what is sent has been read when the stream goes on. That it may arrive later is left out.
int record_signal(std::uint64_t* word, std::uint64_t value, int pe, void* stream) {
  add(kRaise, stream, at_rank(word, pe), static_cast<std::uint32_t>(value));
  return 0;
}
int record_put(void* to, const void* from, std::uint64_t bytes, std::uint64_t* word,
               std::uint64_t value, int pe, void* stream) {
  Record& copy = add(kCopy, stream, at_rank(static_cast<char*>(to), pe));
  copy.from = reinterpret_cast<std::uint64_t>(from);
  copy.bytes = bytes;
  return record_signal(word, value, pe, stream);
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
  const int waits = args->awaited != nullptr ? args->awaited_count : 0;
  for (int i = 0; i < max_of(args->world, waits); ++i) {
    const Tile thread{stream, number, i};
    if (i < args->world && args->raised[i] != nullptr) thread.word(kRaise, args->raised[i], 0);
    if (i < waits) thread.word(kAwait, args->awaited, args->first + i);
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
