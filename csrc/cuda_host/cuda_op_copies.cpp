// Partials that copy engines take to their owners: no multiprocessor stores across a link, which PCIe makes
// slow (stores of 128 bytes, and loads of the same multiprocessors wait behind them).
//
//   path medium   stream       entry -> all | GEMM: rows of an owner | GEMM: of the next one | ... | sum
//                 copy stream  (behind each GEMM) await entry of d | partial -> slot at d, flag at d | ...
//
//   path fused    stream       entry -> all | GEMM, tiles: partial -> own memory, own flag | sum
//                 copy stream  await entry of d, own flags of d's rows | partial -> slot at d, flag at d | ...
//
// The rows of the first owner leave by communication tiles, so that the link begins early; those of others,
// which are there before it is free, together. A source raises one flag at an owner, behind all of its rows.
//
// Reuse. Own memory for the rows of d is last read by the copy of call e - 1, which the call's stream has
// joined before the sum. A slot at d is last read by d's sum of call e - 1, in front of its entry. Flags of
// own tiles are raised and awaited by this rank alone.
//
// A stream's wait orders no writes of other devices, and here there are none: what is copied was written by
// the own GEMM. Still a kernel waits, `meet`, as there may be hundreds of flags. In a captured call the copies
// come behind the GEMM by an edge of the graph, whose scheduler knows nothing of flags.
#include <algorithm>
#include <stdexcept>

#include "core/scatter.h"
#include "cuda_host/cuda_op.h"
#include "cuda_host/nvtx.h"

namespace flux::host {

// Where partials for the rows of `owner` are until they are sent; the own ones stay.
Address CudaOp::partials_for(int owner) const {
  const std::int64_t at = owner == setup_.rank ? 0 : setup_.copied_offset;
  return setup_.data[setup_.rank] + at + slot(owner);
}

void CudaOp::scatter_by_copies(const Schedule& schedule, Stream stream, const Rows& x,
                               const Operand& operand) {
  if (setup_.copied_offset == 0 || setup_.remote || setup_.slots != setup_.world) {
    throw std::invalid_argument(
        "partials that copies move need memory of their own, one node, and sums by their owners");
  }
  driver_->record(forked_, stream);
  put_partials(schedule, stream, x, operand);
  driver_->await_event(copy_stream_, forked_);
  const bool whole = capture_ != 0 && !schedule.spec.split;
  if (whole) join(copy_stream_, stream);
  {
    const Span stage("flux copies");
    const CommTiling& comm = schedule.spec.comm;
    bool first = true;
    for (int place = 0; place < setup_.world; ++place) {
      const int owner = chunk_at(schedule.spec.tiles, place);
      const Range all{row_begin(comm.m, setup_.world, owner), row_end(comm.m, setup_.world, owner)};
      if (owner == setup_.rank || all.begin == all.end) continue;
      const int step = first && !whole && !schedule.spec.split ? comm.rows : all.end - all.begin;
      if (capture_ == 0) await_entry(owner);
      for (int begin = all.begin; begin < all.end; begin += step) {
        const Range rows{begin, std::min(begin + step, all.end)};
        if (!whole) await_partials(schedule, operand.n, owner, place, rows);
        send_partials(schedule, owner, rows);
      }
      const Address flag = words_->signals[owner] + setup_.rank * kWord;
      driver_->memory_ops(copy_stream_, {{MemOp::kWrite, flag, number()}});
      first = false;
    }
  }
  const Address own_flag = words_->signals[setup_.rank] + setup_.rank * kWord;
  driver_->memory_ops(stream, {{MemOp::kWrite, own_flag, number()}});
  join(stream, copy_stream_);
}

// The GEMM, or one for the rows of each owner, into own memory.
void CudaOp::put_partials(const Schedule& schedule, Stream stream, const Rows& x,
                          const Operand& operand) {
  const Span stage("flux kernel");
  if (!schedule.spec.split) {
    return kernels_.at(0)->launch(partials_args(schedule, stream, x, operand, -1), stream);
  }
  for (int place = 0; place < setup_.world; ++place) {
    const int owner = chunk_at(schedule.spec.tiles, place);
    const FluxGemmArgs args = partials_args(schedule, stream, x, operand, owner);
    if (args.m > 0) kernels_.at(0)->launch(args, stream);
    driver_->record(parts_.at(place), stream);
  }
}

// Of the GEMM of the rows of `owner`, or (-1) of all rows.
FluxGemmArgs CudaOp::partials_args(const Schedule& schedule, Stream stream, const Rows& x,
                                   const Operand& operand, int owner) const {
  const int m = schedule.spec.problem.m, world = setup_.world;
  FluxGemmArgs args = gemm_args(schedule, stream, operand, x.k, std::max(owner, 0));
  const int first = owner < 0 ? 0 : row_begin(m, world, owner);
  args.a = pointer<const void>(x.x + static_cast<Address>(first * x.ld * setup_.x_bytes));
  args.lda = x.ld;
  args.scale_a = pointer<const float>(x.scale) + (setup_.scaled_rows ? first : 0);
  args.slot_ld = operand.n;
  args.guard_rows = static_cast<std::int32_t>(setup_.guard_bytes / setup_.row_bytes);
  if (owner >= 0) {
    only_chunk(schedule, owner, &args);
    args.slots[0] = pointer<void>(partials_for(owner));
    return args;
  }
  const ScatterTiling s{m, operand.n, world, kernels_.at(0)->tile_m(), kernels_.at(0)->tile_n()};
  const int flags = flag_rows(s) * flag_columns(s);  // of an owner's rows
  for (int to = 0; to < world; ++to) {
    args.slots[to] = pointer<void>(partials_for(to));
    // A flag's number counts those of sources before this one, which have none here.
    args.flags[to] =
        pointer<std::uint32_t>(words_->offers[setup_.rank]) + (to - setup_.rank) * flags;
  }
  return args;
}

// Makes the copy stream wait until partials for rows of `owner`, the place-th in order, are there.
void CudaOp::await_partials(const Schedule& schedule, int n, int owner, int place, Range rows) {
  if (schedule.spec.split) return driver_->await_event(copy_stream_, parts_.at(place));
  const Kernel& kernel = *kernels_.at(0);
  const int m = schedule.spec.problem.m;
  const ScatterTiling s{m, n, setup_.world, kernel.tile_m(), kernel.tile_n()};
  const Range tiles{rows.begin / s.tile_m, ceil_div(rows.end, s.tile_m)};
  const FluxMeetArgs args = own_flags(flag_index(s, owner, owner, tiles.begin, 0),
                                      (tiles.end - tiles.begin) * flag_columns(s));
  const auto what = [&] { return record_of(Work::kWait, epoch_, setup_.rank, owner); };
  stamped(streams_.get(), copy_stream_, what, [&] { await_own_flags(args, copy_stream_); });
}

// A wait for so many flags of own tiles.
FluxMeetArgs CudaOp::own_flags(int first, int count) const {
  FluxMeetArgs args = rows_wait();
  args.awaited = pointer<const std::uint32_t>(words_->offers[setup_.rank]);
  args.first = first;
  args.awaited_count = count;
  args.code = FLUX_WAIT_PARTIAL;
  return args;
}

// Makes a stream wait, in a kernel unless ranks share the device: then no multiprocessor may be free.
void CudaOp::await_own_flags(const FluxMeetArgs& args, Stream stream) {
  if (!setup_.shared) return kernels_.at(0)->meet(args, stream);
  std::vector<MemOp> flags;
  for (int row = 0; row < std::max(args.rows, 1); ++row) {
    const int begin = args.first + row * args.row_step;
    for (int i = begin; i < begin + args.awaited_count; ++i) {
      flags.push_back({MemOp::kWait, words_->offers[setup_.rank] + i * kWord, epoch_});
    }
  }
  driver_->memory_ops(stream, flags);
}

// Makes the copy stream wait for the entry of an owner. In captured calls all ranks have met.
void CudaOp::await_entry(int owner) {
  const Address entry = words_->entries[setup_.rank] + owner * kWord;
  const auto entered = [&] { return record_of(Work::kEntry, epoch_, owner); };
  stamped(streams_.get(), copy_stream_, entered,
          [&] { driver_->memory_ops(copy_stream_, {{MemOp::kWait, entry, epoch_}}); });
}

void CudaOp::send_partials(const Schedule& schedule, int owner, Range rows) {
  const auto bytes = static_cast<std::size_t>((rows.end - rows.begin) * setup_.row_bytes);
  const auto what = [&] {
    return record_of(Work::kCopy, epoch_, owner, owner, 0, rows, owner, -1,
                     static_cast<std::int64_t>(bytes));
  };
  const int first = row_begin(schedule.spec.comm.m, setup_.world, owner);
  const std::int64_t at = (rows.begin - first) * setup_.row_bytes;
  stamped(streams_.get(), copy_stream_, what, [&] {
    driver_->copy(copy_stream_, setup_.data[owner] + slot(setup_.rank) + at,
                  partials_for(owner) + at, bytes);
  });
}

}  // namespace flux::host
