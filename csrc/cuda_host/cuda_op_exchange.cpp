// All-to-alls of heads on GPUs (flux.ulysses): copy engines move blocks beside the GEMM. Between nodes:
// cuda_op_exchange_nodes.cpp.
//
//   GemmAllToAll   stream       entry -> all | kernel: tile -> own memory, own flag | own block | await all blocks
//                  copy stream  (forked before the kernel) await flags of d's columns, entry of d | block -> d, flag ...
//
//   AllToAllGemm   stream       entry -> all | await entries | own heads, by rank | offer -> all | kernel: wait, multiply
//                  copy stream  (forked behind the offers) per tile of rows: offer of s | its block -> own columns ..., signal
//
// The kernels are those of GEMM + ReduceScatter and AllGather + GEMM, as one rank runs them. The first visits
// the columns of a rank together, those of rank + 1 first and the own ones last (core/tile_order.h), and
// raises a flag for each tile in the own pad. The second waits for a tile of rows, which is there when the
// blocks of all ranks are.
//
// A block has a row for each token and the columns of one rank, of all packed tensors. Rows of a GEMM have the
// columns of all ranks. So a block is as many pieces for each row as there are tensors.
//
// Reuse. GemmAllToAll: the product is last read by copies of call e - 1, which its stream has joined. The
// blocks at d are last read by what d's caller enqueued behind call e - 1, in front of its entry. AllToAllGemm:
// own heads are last read by peers' copies of call e - 1, which they have joined before their entries, and
// all of these are awaited before heads are written. Gathered rows are written by this rank alone, behind its
// kernel of call e - 1. An offer of call e is raised at s behind the entry of s, so s awaits it in call e.
// Copies across the link read what a peer wrote to its own memory before it offered it, as in gather_tiles.h.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/scatter.h"
#include "core/tile_map.h"
#include "cuda_host/cuda_op.h"
#include "cuda_host/nvtx.h"

namespace flux::host {

void CudaOp::set_columns(std::vector<std::vector<Range>> columns) {
  std::size_t tensors = 0;
  for (const auto& of_rank : columns) tensors = std::max(tensors, of_rank.size());
  if (columns.size() != static_cast<std::size_t>(setup_.world) ||
      tensors * columns.size() > static_cast<std::size_t>(kMaxRuns)) {
    throw std::invalid_argument(
        "ranks times packed tensors must be at most " + std::to_string(kMaxRuns) + ", got " +
        std::to_string(columns.size()) + " times " + std::to_string(tensors));
  }
  columns_ = std::move(columns);
  visits_ = visited_columns();
}

void CudaOp::require_exchange_room(const Schedule& schedule) const {
  const int chunk = schedule.spec.problem.m / setup_.world;
  const std::int64_t block_row = block_columns() * setup_.x_bytes;
  if (schedule.spec.problem.op == OpKind::kAllToAllGemm) {
    require("signals", ceil_div(chunk, schedule.spec.comm.rows), setup_.signals);
    require("gathered rows", chunk, setup_.rest_offset / setup_.row_bytes);
    require("rows of blocks", schedule.spec.problem.m,
            (blocks_end() - setup_.rest_offset) / block_row);
    return require_staged(schedule, ceil_div(chunk, schedule.spec.comm.rows));
  }
  const ScatterTiling s{chunk, product_columns(), 1, kernels_.at(0)->tile_m(),
                        kernels_.at(0)->tile_n()};
  require("flags of own tiles", flag_count(s), setup_.offers);
  require("rows of blocks", schedule.spec.problem.m, setup_.copied_offset / block_row);
  require("rows of the product", chunk,
          (blocks_end() - setup_.copied_offset - setup_.guard_bytes) / setup_.row_bytes);
  require_staged(schedule, 1);
}

int CudaOp::block_columns() const {
  int columns = 0;
  for (const Range& piece : columns_.at(0)) columns += piece.end - piece.begin;
  return columns;
}

int CudaOp::product_columns() const { return static_cast<int>(setup_.row_bytes / setup_.x_bytes); }

// Copies rows of a block, the pieces of each row, to or from where rows have the columns of all ranks.
// `rank`: whose columns they are.
void CudaOp::copy_block(Stream stream, int rank, Address block, Address wide, int rows,
                        bool gathers) {
  const Address bytes = setup_.x_bytes;
  const std::size_t step = block_columns() * bytes, wide_step = setup_.row_bytes;
  Address at = block;
  for (const Range& piece : columns_.at(rank)) {
    const Address there = wide + piece.begin * bytes;
    const std::size_t width = (piece.end - piece.begin) * bytes;
    if (gathers) {
      driver_->copy_rows(stream, there, wide_step, at, step, width, rows);
    } else {
      driver_->copy_rows(stream, at, step, there, wide_step, width, rows);
    }
    at += width;
  }
}

// Offset of the block of `rank`'s rows among blocks of all ranks' rows.
Address CudaOp::block_offset(const Schedule& schedule, int rank) const {
  std::int64_t first = 0;
  for (int before = 0; before < rank; ++before) first += schedule.spec.rows[before];
  return first * block_columns() * setup_.x_bytes;
}

// A GEMM of the own rows, as a problem of one rank.
FluxGemmArgs CudaOp::own_gemm(const Schedule& schedule, Stream stream, const Operand& operand,
                              int k) const {
  FluxGemmArgs args = gemm_args(schedule, stream, operand, k);
  only_rows(schedule.spec.rows[setup_.rank], &args);
  return args;
}

// -- GemmAllToAll ----------------------------------------------------------------------------------

void CudaOp::project(const Schedule& schedule, Stream stream, const Rows& x,
                     const Operand& operand) {
  const Span call("GemmAllToAll", schedule.spec.problem.m);
  require_exchange_room(schedule);
  begin(schedule, stream);
  driver_->record(forked_, stream);
  const int rank = setup_.rank, world = setup_.world, own = schedule.spec.rows[rank];
  const Address product = setup_.data[rank] + setup_.copied_offset + setup_.guard_bytes;
  if (own > 0) {
    const Span stage("flux kernel");
    FluxGemmArgs args = own_gemm(schedule, stream, operand, x.k);
    args.order.column_ranges = static_cast<std::int32_t>(visits_.size() / 2);
    args.order.sequence = visits_.data();
    args.a = pointer<const void>(x.x);
    args.lda = x.ld;
    args.slots[0] = pointer<void>(product);
    args.slot_ld = operand.n;
    args.guard_rows = static_cast<std::int32_t>(setup_.guard_bytes / setup_.row_bytes);
    args.flags[0] = pointer<std::uint32_t>(words_->offers[rank]);
    kernels_.at(0)->launch(args, stream);
  }
  driver_->await_event(copy_stream_, forked_);
  const bool whole = capture_ != 0;  // a graph's scheduler knows nothing of flags
  if (whole) join(copy_stream_, stream);
  {
    const Span stage("flux copies");
    if (setup_.remote) exchange_blocks(schedule, product);
    for (int step = 1; step < world; ++step) {
      const int peer = wrap(rank + step, world);
      if (!is_near(peer)) continue;
      if (own > 0 && !whole) await_columns(schedule, peer, copy_stream_);
      send_block(schedule, peer, product);
    }
  }
  const Address mine = setup_.data[rank] + block_offset(schedule, rank);
  const auto kept = [&] { return block_record(schedule, rank, rank, {0, own}, rank); };
  stamped(streams_.get(), stream, kept, [&] {
    if (own > 0) copy_block(stream, rank, mine, product, own, false);
    driver_->memory_ops(stream, {{MemOp::kWrite, words_->signals[rank] + rank * kWord, number()}});
  });
  join(stream, copy_stream_);
  if (setup_.remote) join(stream, network_stream_);
  FluxMeetArgs all = rows_wait();
  all.code = FLUX_WAIT_PARTIAL;
  all.sync.trace = nullptr;  // the stream's record says what is awaited
  const auto awaits = [&] { return record_of(Work::kResult, epoch_); };
  stamped(streams_.get(), stream, awaits, [&] { kernels_.at(0)->meet(all, stream); });
  end(stream, false);
}

// Ranges of columns in the order in which they leave: of other nodes first, whose links are slower, and
// those of the next rank first. Heads that ranks share leave with the first of them.
std::vector<std::int32_t> CudaOp::visited_columns() const {
  std::vector<std::int32_t> order;
  const int far = setup_.world - lanes();
  for (int step = 0; step < setup_.world; ++step) {
    const int near = neighbours().begin + wrap(setup_.rank + 1 + step, lanes());
    const int peer = step < far ? far_rank(step, 1) : near;
    for (const Range& piece : columns_[peer]) {
      bool known = false;
      for (std::size_t i = 0; i < order.size(); i += 2) known |= order[i] == piece.begin;
      if (!known) order.insert(order.end(), {piece.begin, piece.end});
    }
  }
  return order;
}

// Makes a stream wait until the tiles with columns of `peer` are there, of all own rows.
void CudaOp::await_columns(const Schedule& schedule, int peer, Stream stream) {
  const Kernel& kernel = *kernels_.at(0);
  const ScatterTiling s{schedule.spec.rows[setup_.rank], product_columns(), 1, kernel.tile_m(),
                        kernel.tile_n()};
  for (const Range& piece : columns_.at(peer)) {
    const int first = piece.begin / s.tile_n;
    FluxMeetArgs args = own_flags(first, ceil_div(piece.end, s.tile_n) - first);
    args.rows = ceil_div(s.m, s.tile_m);
    args.row_step = flag_columns(s);
    args.sync.trace = nullptr;
    const auto what = [&] { return record_of(Work::kOwnGemm, epoch_, peer); };
    stamped(streams_.get(), stream, what, [&] { await_own_flags(args, stream); });
  }
}

// In a trace: rows of a block that is moved from or to a peer, and the signal at a rank that follows, if any.
Record CudaOp::block_record(const Schedule& schedule, int peer, int at, Range rows,
                            int signal) const {
  const std::int64_t bytes = (rows.end - rows.begin) * block_columns() * setup_.x_bytes;
  const int tile = rows.begin / schedule.spec.comm.rows;
  return record_of(Work::kCopy, epoch_, peer, -1, tile, rows, at, signal, bytes);
}

// The block of the columns of `peer`, behind its entry (in captured calls all ranks have met), and its flag.
void CudaOp::send_block(const Schedule& schedule, int peer, Address product) {
  if (capture_ == 0) {
    const Address entry = words_->entries[setup_.rank] + peer * kWord;
    const auto awaits = [&] { return record_of(Work::kEntry, epoch_, peer); };
    stamped(streams_.get(), copy_stream_, awaits,
            [&] { driver_->memory_ops(copy_stream_, {{MemOp::kWait, entry, epoch_}}); });
  }
  const int own = schedule.spec.rows[setup_.rank];
  const Address to = setup_.data[peer] + block_offset(schedule, setup_.rank);
  const Address flag = words_->signals[peer] + setup_.rank * kWord;
  const auto what = [&] { return block_record(schedule, peer, peer, {0, own}, setup_.rank); };
  stamped(streams_.get(), copy_stream_, what, [&] {
    copy_block(copy_stream_, peer, to, product, own, false);
    driver_->memory_ops(copy_stream_, {{MemOp::kWrite, flag, number()}});
  });
}

// -- AllToAllGemm ----------------------------------------------------------------------------------

// Begins a call. What is put on the stream next may write the own heads, by rank, and the own columns of
// the own rows.
void CudaOp::begin_heads(const Schedule& schedule, Stream stream) {
  require_exchange_room(schedule);
  begin(schedule, stream);
  if (capture_ == 0 && !setup_.poison) driver_->memory_ops(stream, await_node(words_->entries));
}

// Gathers the heads of the own rows, and multiplies them, if the operand has columns.
void CudaOp::gather_heads(const Schedule& schedule, Stream stream, const Operand& operand) {
  const Span call("AllToAllGemm", schedule.spec.problem.m);
  const int rank = setup_.rank, own = schedule.spec.rows[rank];
  std::vector<MemOp> offers;
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    if (peer == rank) continue;
    offers.push_back({MemOp::kWrite, words_->offers[peer] + rank * kWord, number()});
  }
  driver_->memory_ops(stream, offers);
  driver_->record(forked_, stream);
  const bool multiplies = own > 0 && operand.n > 0;
  const bool beside = capture_ == 0 || setup_.graph_overlap;
  if (multiplies && beside) multiply_heads(schedule, stream, operand);
  driver_->await_event(copy_stream_, forked_);
  if (setup_.remote) {
    driver_->await_event(network_stream_, forked_);
    setup_.remote->open(network_stream_, epoch_);
  }
  {
    const Span stage("flux copies");
    fetch_heads(schedule);
  }
  if (multiplies && !beside) {
    join(stream, copy_stream_);
    multiply_heads(schedule, stream, operand);
  }
  if (!multiplies || beside) join(stream, copy_stream_);
  if (setup_.remote) join(stream, network_stream_);
  end(stream, multiplies && !setup_.remote);
}

void CudaOp::multiply_heads(const Schedule& schedule, Stream stream, const Operand& operand) {
  const Span stage("flux kernel");
  FluxGemmArgs args = own_gemm(schedule, stream, operand, product_columns());
  args.a = pointer<const void>(setup_.data[setup_.rank]);
  args.lda = product_columns();
  args.d = pointer<void>(operand.out);
  args.ldd = operand.out_ld;
  args.bias = pointer<const void>(operand.bias);
  args.signals = pointer<const std::uint32_t>(words_->signals[setup_.rank]);
  kernels_.at(0)->launch(args, stream);
}

// Tile by tile of the own rows the blocks of all peers. At any time each rank reads from another one. Ranks
// of other nodes may have more tiles, whose rows this rank sends.
void CudaOp::fetch_heads(const Schedule& schedule) {
  const int rank = setup_.rank, world = setup_.world, own = schedule.spec.rows[rank];
  const int tile_rows = schedule.spec.comm.rows;
  const int most = setup_.remote ? schedule.spec.problem.m / world : own;
  for (int first = 0; first < most; first += tile_rows) {
    if (setup_.remote) fetch_from_nodes(schedule, first / tile_rows);
    if (first >= own) continue;
    const Range rows{first, std::min(first + tile_rows, own)};
    for (int step = 1; step < world; ++step) {
      const int peer = wrap(rank + step, world);
      if (!is_near(peer)) continue;
      const bool last = step == world - 1 && !setup_.remote;
      fetch_from(schedule, peer, rows, last ? first / tile_rows : -1);
    }
    if (!setup_.remote) continue;
    join(copy_stream_, network_stream_);
    const int signal = first / tile_rows;
    const Address word = words_->signals[rank] + signal * kWord;
    const auto there = [&] { return block_record(schedule, rank, rank, rows, signal); };
    stamped(streams_.get(), copy_stream_, there,
            [&] { driver_->memory_ops(copy_stream_, {{MemOp::kWrite, word, number()}}); });
  }
}

// Copies rows of the block of a rank of this node. `signal`: that is raised behind them; -1: none.
void CudaOp::fetch_from(const Schedule& schedule, int peer, Range rows, int signal) {
  const int rank = setup_.rank, count = rows.end - rows.begin;
  const Address row = block_columns() * setup_.x_bytes;
  if (rows.begin == 0) {
    const Address offer = words_->offers[rank] + peer * kWord;
    const auto awaits = [&] { return record_of(Work::kEntry, epoch_, peer); };
    stamped(streams_.get(), copy_stream_, awaits,
            [&] { driver_->memory_ops(copy_stream_, {{MemOp::kWait, offer, number()}}); });
  }
  const Address block = result(peer) + block_offset(schedule, rank) + rows.begin * row;
  const Address gathered = setup_.data[rank] + rows.begin * setup_.row_bytes;
  const auto what = [&] { return block_record(schedule, peer, rank, rows, signal); };
  stamped(streams_.get(), copy_stream_, what, [&] {
    copy_block(copy_stream_, peer, block, gathered, count, true);
    if (signal < 0) return;
    const Address word = words_->signals[rank] + signal * kWord;
    driver_->memory_ops(copy_stream_, {{MemOp::kWrite, word, number()}});
  });
}

}  // namespace flux::host
