// Sums that recording_gpu.cpp writes down: reductions, and those that nodes put.
#pragma once

#include "core/relay.h"
#include "cuda/arguments.h"
#include "cuda/runtime/nvshmem_abi.h"
#include "nvshmem/heaps.h"
#include "records.h"

namespace {

using namespace flux;

std::vector<const void*> sources_of(const void* const* slots, int count, const void* by_switch) {
  if (by_switch == nullptr) return std::vector<const void*>(slots, slots + count);
  return everywhere(by_switch);
}
std::vector<void*> outs_of(const FluxReduceArgs& args) {
  if (args.switch_out == nullptr) return std::vector<void*>(args.outs, args.outs + args.out_count);
  return everywhere(args.switch_out);
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
    const auto sources = sources_of(args.slots, args.slot_count, args.switch_in);
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

int record_sums(const FluxReduceArgs* args, void* stream);

std::size_t gemm_launch = 0;  // record of the last launch of a scattering GEMM

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
      const int flag = flag_index(s, source, args->rank, tile_row, unit % columns);
      tile.word(kAwait, args->flags, args->by_source != 0 ? source : flag);
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

}  // namespace
