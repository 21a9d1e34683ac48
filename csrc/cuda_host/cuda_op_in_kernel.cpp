// AllGather or AllReduce inside the kernel (docs/kernels/protocol.md): a call is one launch for each weight.
//
// AGGemm: the first kernel pushes the own rows to all ranks, and all wait for the rows of peers. GemmAR:
// the kernel sums the own rows, and puts them to all ranks. Streams copy nothing and await no words, and the
// host knows no number: so a captured call is the same launches.
#include <stdexcept>

#include "cuda_host/cuda_op.h"
#include "cuda_host/nvtx.h"

namespace flux::host {

// Word r: of rank r. Then the counts.
Address CudaOp::pushed_words(int rank) const {
  return captured_.offers[rank] + setup_.offers * kWord;
}

FluxGather CudaOp::pushed_rows(const Schedule& schedule, Address x) const {
  const int m = schedule.spec.problem.m, world = setup_.world, rank = setup_.rank;
  const std::int64_t first = row_begin(m, world, rank) * setup_.row_bytes;
  FluxGather gather{};
  gather.rows = pointer<const void>(x);
  gather.bytes = static_cast<std::uint64_t>(row_count(m, world, rank) * setup_.row_bytes);
  for (int peer = 0; peer < world; ++peer) {
    gather.to[peer] = pointer<void>(pushed_data(peer) + first);
    gather.raised[peer] = pointer<std::uint32_t>(pushed_words(peer)) + rank;
  }
  if (setup_.multicast != 0) {
    gather.everywhere = pointer<void>(setup_.multicast + setup_.sums_offset + first);
  }
  gather.odd = setup_.pushed_bytes;
  gather.counts = pointer<std::uint32_t>(pushed_words(rank)) + world;
  return gather;
}

// A traced call has a number of the host: kernels stamp with theirs, which other paths do not count.
void CudaOp::begin_in_kernel(Stream stream) {
  capture_ = driver_->capture(stream);
  refuse_traced_captures();
  if (capture_ != 0) return follow_capture(stream);
  calls_->begin(stream, this, false);
  if (!traced()) return;
  ++epoch_;
  if (renews_words()) renew_signals(stream);
  whole_call_ = streams_->begin(stream);
}

// FluxSync.launch: which weight, and in a trace the number of the call.
int CudaOp::launch_in_kernel(int weight) const {
  if (!traced()) return weight;
  return static_cast<int>(FLUX_TRACE_IN_KERNEL | (epoch_ << 8 & ~FLUX_TRACE_IN_KERNEL)) | weight;
}

void CudaOp::gather_in_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                              const std::vector<Operand>& operands, Address gathered) {
  if (setup_.remote || setup_.scales_travel) {
    throw std::invalid_argument(
        "path = in_kernel has no rows of other nodes, and no scales of rows");
  }
  begin_in_kernel(stream);
  const FluxGather pushed = pushed_rows(schedule, x.x);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Span stage("flux kernel");
    const Operand& operand = operands[i];
    FluxGemmArgs args =
        gemm_args(schedule, stream, operand, x.k, launch_in_kernel(static_cast<int>(i)));
    args.a = pointer<const void>(pushed_data(setup_.rank));
    args.lda = x.k;
    args.scale_a = pointer<const float>(x.scale);
    args.d = pointer<void>(operand.out);
    args.ldd = operand.out_ld;
    args.bias = pointer<const void>(operand.bias);
    args.signals = pointer<const std::uint32_t>(pushed_words(setup_.rank));
    args.gather = pushed;
    args.gather.first = i == 0 ? 1 : 0;
    args.gather.last = i + 1 == operands.size() ? 1 : 0;
    kernels_.at(i)->launch(args, stream);
  }
  if (gathered != 0) {
    const Span stage("flux collect");
    const auto bytes = static_cast<std::uint64_t>(schedule.spec.problem.m * setup_.row_bytes);
    const auto collected = [&] { return record_of(Work::kCollect, epoch_); };
    stamped(streams_.get(), stream, collected, [&] {
      kernels_.at(0)->collect({pointer<const void>(pushed_data(setup_.rank)), setup_.pushed_bytes,
                               pushed.counts, pointer<void>(gathered), bytes},
                              stream);
    });
  }
  end(stream, gathered == 0);
}

// Where `by_switch` uses it in a reduction that follows.
void CudaOp::put_by_switch(FluxAllReduce* to) const {
  if (setup_.multicast == 0) return;
  if (setup_.sums_by_switch)
    to->switch_in = pointer<const void>(setup_.multicast + slot(setup_.rank));
  if (setup_.row_bytes % CudaOpSetup::kSwitchBytes == 0) {
    to->switch_out = pointer<void>(setup_.multicast + setup_.rest_offset);
  }
}

Address CudaOp::sum_flags(int rank) const {
  return pushed_words(rank) + (setup_.world + FLUX_GATHER_WORDS) * kWord;
}

FluxAllReduce CudaOp::all_reduce(Address out) const {
  const int world = setup_.world, rank = setup_.rank;
  FluxAllReduce to{};
  for (int peer = 0; peer < world; ++peer) {
    to.partials[peer] = pointer<const void>(setup_.data[rank] + slot(peer));
    to.outs[peer] = pointer<void>(peer == rank ? out : result(peer));
    to.sums[peer] = pointer<std::uint32_t>(sum_flags(peer)) + setup_.sum_flags;
  }
  to.put = pointer<const void>(result(rank));
  put_by_switch(&to);
  to.words = pointer<std::uint32_t>(sum_flags(rank));
  to.word_count = static_cast<std::uint32_t>(setup_.sum_words);
  to.scale = setup_.scale;
  to.counts = pointer<std::uint32_t>(pushed_words(rank)) + world;
  return to;
}

// Slots and the result are those of other paths: what reads them ends before this rank's call does.
void CudaOp::reduce_in_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                              const Operand& operand, Address out) {
  if (setup_.remote || !setup_.all_reduce || setup_.slots != setup_.world) {
    throw std::invalid_argument(
        "path = in_kernel is for GemmAR on one node, whose partials are summed by their owners");
  }
  require_room(schedule);
  begin_in_kernel(stream);
  FluxGemmArgs args = gemm_args(schedule, stream, operand, x.k, launch_in_kernel(0));
  args.a = pointer<const void>(x.x);
  args.lda = x.ld;
  args.scale_a = pointer<const float>(x.scale);
  args.bias = pointer<const void>(operand.bias);
  for (int owner = 0; owner < setup_.world; ++owner) {
    args.slots[owner] =
        pointer<void>(setup_.sums_by_switch ? setup_.data[setup_.rank] + slot(owner)
                                            : setup_.data[owner] + slot(setup_.rank));
    args.flags[owner] = pointer<std::uint32_t>(sum_flags(owner));
  }
  args.slot_ld = operand.n;
  args.guard_rows = static_cast<std::int32_t>(setup_.guard_bytes / setup_.row_bytes);
  args.all_reduce = all_reduce(out);
  const Span stage("flux kernel");
  kernels_.at(0)->launch(args, stream);
  end(stream, true);
}

}  // namespace flux::host
