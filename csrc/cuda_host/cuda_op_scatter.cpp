// ReduceScatter and AllReduce on GPUs: tiles go to their owners, then each owner sums (cuda_op.h).
#include <algorithm>

#include "core/relay.h"
#include "cuda_host/cuda_op.h"
#include "cuda_host/nvtx.h"

namespace flux::host {

// What the kernel needs to sum the own rows by itself (Knobs.reduce = in_kernel).
FluxAllReduce CudaOp::own_sums(Address out) const {
  if (setup_.all_reduce || setup_.remote || relay() || setup_.slots != setup_.world) {
    throw std::invalid_argument(
        "reduce = in_kernel is for GemmRS on one node, whose partials are summed by their owners");
  }
  const int rank = setup_.rank;
  FluxAllReduce to{};
  for (int source = 0; source < setup_.world; ++source) {
    to.partials[source] = pointer<const void>(setup_.data[rank] + slot(source));
  }
  to.outs[rank] = pointer<void>(out);
  to.words = pointer<std::uint32_t>(words_->signals[rank] + region_of(rank) * kWord);
  to.scale = setup_.scale;
  to.scatters = 1;
  return to;
}

void CudaOp::scatter(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand,
                     Address out) {
  require_room(schedule);
  begin(schedule, stream);
  if (schedule.spec.copied) return scatter_by_copies(schedule, stream, x, operand);
  FluxGemmArgs args = gemm_args(schedule, stream, operand, x.k);
  args.a = pointer<const void>(x.x);
  args.lda = x.ld;
  args.scale_a = pointer<const float>(x.scale);
  if (args.groups != nullptr) {  // products
    args.d = pointer<void>(operand.out);
    args.ldd = operand.out_ld;
  }
  for (int owner = 0; owner < setup_.world; ++owner) {
    const int to = holder(owner);
    const std::int64_t at = setup_.slots > 1 ? partial_of(owner, setup_.rank % lanes()) : slot(0);
    const Address owned =
        setup_.sums_by_switch ? setup_.data[setup_.rank] + slot(owner) : setup_.data[to] + at;
    args.slots[owner] = pointer<void>(owned);
    args.flags[owner] = pointer<std::uint32_t>(words_->signals[to] + region_of(owner) * kWord);
  }
  args.slot_ld = operand.n;
  args.guard_rows = static_cast<std::int32_t>(setup_.guard_bytes / setup_.row_bytes);
  args.entries = pointer<const std::uint32_t>(words_->entries[setup_.rank]);
  if (schedule.spec.sums_in_kernel) {
    args.bias = pointer<const void>(operand.bias);
    args.all_reduce = own_sums(out);
  } else if (args.groups == nullptr) {
    lend_margin(&args);
  }
  // With several nodes, the fork comes before the kernel: it is where the call begins.
  if (setup_.remote) driver_->record(forked_, stream);
  const Span stage("flux kernel");
  put_route(stream);
  kernels_.at(0)->launch(args, stream);
  if (setup_.remote) send_sums(schedule, operand.n);
}

// Arguments of the sum of all partials for this rank's rows, without its destination.
FluxReduceArgs CudaOp::reduce_args(const Schedule& schedule, int n) const {
  const int m = schedule.spec.problem.m, rank = setup_.rank, world = setup_.world;
  FluxReduceArgs args{};
  args.first_row = row_begin(m, world, rank);
  args.rows = row_count(m, world, rank);
  args.n = n;
  args.m = m;
  args.tile_m = kernels_.at(0)->tile_m();
  args.tile_n = kernels_.at(0)->tile_n();
  args.world = world;
  args.rank = rank;
  args.slot_count = setup_.slots;
  for (int source = 0; source < std::min(setup_.slots, FLUX_MAX_WORLD); ++source) {
    args.slots[source] = pointer<const void>(setup_.data[rank] + slot(source));
  }
  args.slot_ld = args.out_ld = n;
  args.by_source = schedule.spec.copied ? 1 : 0;
  args.flags = pointer<const std::uint32_t>(words_->signals[rank] + region_of(rank) * kWord);
  args.first_source = neighbours().begin;
  args.source_count = lanes();
  args.scale = setup_.scale;
  args.shares = groups_.shares;
  args.sm_count = setup_.sm_count;
  // A device places blocks breadth-first, so n blocks may hold n multiprocessors. There they wait
  // for a GEMM that needs whole multiprocessors. So the limit is this rank's share of the
  // multiprocessors.
  if (setup_.shared) args.most_blocks = setup_.sm_count;
  args.sync = sync(rank);
  return args;
}

void CudaOp::reduce(const Schedule& schedule, Stream stream, const Operand& operand, Address out) {
  put_reduction(schedule, stream, operand, out, false);
}

// `early`: the reduction is directly after its GEMM on the stream and begins beside the GEMM's end.
void CudaOp::put_reduction(const Schedule& schedule, Stream stream, const Operand& operand,
                           Address out, bool early) {
  FluxReduceArgs args = reduce_args(schedule, operand.n);
  args.bias = pointer<const void>(operand.bias);
  args.early = early ? 1 : 0;
  args.out_count = setup_.all_reduce ? lanes() : 1;
  for (int to = 0; to < args.out_count; ++to) {
    const Address result = setup_.data[neighbours().begin + to] + setup_.rest_offset +
                           args.first_row * setup_.row_bytes;
    args.outs[to] = pointer<void>(setup_.all_reduce ? result : out);
  }
  if (setup_.multicast != 0) by_switch(args);
  if (setup_.remote) {
    join(stream, network_stream_);
    reduce_nodes(&args);
  }
  {
    const Span stage("flux reduction");
    relay() ? add_up_nodes(args, stream) : kernels_.at(0)->reduce(args, stream);
  }
  if (setup_.all_reduce) {
    if (setup_.remote) share_result(schedule, stream);
    collect(schedule.spec.problem.m, stream, out);
  }
  end(stream, !setup_.all_reduce && !setup_.remote && args.rows > 0);
}

// Uses the switch where possible: for the addition if that need not be in rank order, and for the
// distribution of results if the switch supports their row size.
void CudaOp::by_switch(FluxReduceArgs& args) const {
  if (setup_.sums_by_switch) {
    args.switch_in = pointer<const void>(setup_.multicast + slot(setup_.rank));
  }
  if (setup_.all_reduce && setup_.row_bytes % CudaOpSetup::kSwitchBytes == 0) {
    args.switch_out =
        pointer<void>(setup_.multicast + setup_.rest_offset + args.first_row * setup_.row_bytes);
  }
}

void CudaOp::gemm_rs(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand,
                     Address out) {
  const Span call(setup_.all_reduce ? "GemmAR" : "GemmRS", schedule.spec.problem.m);
  if (schedule.spec.in_kernel) return reduce_in_kernel(schedule, stream, x, operand, out);
  scatter(schedule, stream, x, operand, out);
  if (schedule.spec.sums_in_kernel) return end(stream, true);
  // Not early if ranks share the device, or leave some of it to other streams: the reduction would
  // wait in places that a peer's GEMM or those streams' kernels need.
  const bool alone =
      !setup_.shared && setup_.margin == 0 && !setup_.remote && !schedule.spec.copied;
  put_reduction(schedule, stream, operand, out, alone && capture_ == 0);
}

// GemmAR: copies the result to `out` after all ranks' rows of it have been written here.
void CudaOp::collect(int m, Stream stream, Address out) {
  const Span stage("flux collect");
  // Not a wait of the stream: the copy reads what peers have written (docs/kernels/protocol.md).
  const auto met = [&] { return record_of(Work::kResult, epoch_); };
  stamped(streams_.get(), stream, met,
          [&] { kernels_.at(0)->meet(meeting(words_->done), stream); });
  const auto collected = [&] { return record_of(Work::kCollect, epoch_); };
  stamped(streams_.get(), stream, collected, [&] {
    driver_->copy(stream, out, setup_.data[setup_.rank] + setup_.rest_offset,
                  static_cast<std::size_t>(m) * setup_.row_bytes);
  });
}

}  // namespace flux::host
