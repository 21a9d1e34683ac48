// Calls that are captured into a CUDA graph: the protocol without a call number on the host.
//
// A graph holds values, and every replay uses them again. So the number of a captured call lies in
// device memory, where the kernel `meet` counts. Entries and the words of GemmAR hold this number.
// The same kernel and the waits of GEMM tiles read them. Signals and flags, which copy streams
// raise and await, hold 1. Their rank resets them at the start of a call:
//
//   reset own | entry -> all | (AllGather: await all entries) | as in an eager call
//
// For a call, a signal, offer or flag of a rank is raised only after the rank's entry has been
// seen, and the entry comes after the reset. At the reset, no wait for such a word of an earlier
// call is pending: only the rank's own streams await these words, and they do so before its entry.
// The fork comes after all this, so copy streams of a captured call wait for no entries.
//
// An edge of the graph puts the copies before the kernel that waits for the copies of peers (unless
// graph_overlap is set). So no copy waits for a kernel, and ranks cannot wait for each other in a
// circle, whatever order a graph's scheduler derives from the edges. With the copies beside the
// kernel, they could.
//
// Captured and eager calls use the same data, but separate words. Each entry says that the rank's
// stream has passed all earlier calls of both kinds. This holds if replays run on streams that come
// after the eager calls, and eager calls on streams that come after the replays. The caller ensures
// this, as for any work.
#include "core/scatter.h"
#include "cuda_host/cuda_op.h"

namespace flux::host {

FluxMeetArgs CudaOp::meeting(const std::vector<Address>& words) const {
  FluxMeetArgs args{};
  args.world = setup_.world;
  args.rank = setup_.rank;
  if (capture_ != 0) args.count = pointer<std::uint32_t>(count_);
  for (int rank = neighbours().begin; rank < neighbours().end; ++rank) {
    args.raised[rank] = pointer<std::uint32_t>(words[rank]) + setup_.rank;
    args.statuses[rank] = pointer<std::uint64_t>(status_of(rank));
  }
  args.awaited = pointer<const std::uint32_t>(words[setup_.rank]);
  args.first = neighbours().begin;
  args.awaited_count = lanes();
  args.code = FLUX_WAIT_MEET;
  args.sync = sync(0);
  return args;
}

// Signals (and the offers behind all signals) or flags that calls with this schedule await.
int CudaOp::words_in_use(const Schedule& schedule) const {
  if (is_exchange(schedule.spec.problem.op)) return setup_.signals + setup_.offers;
  if (schedule.spec.tiles.op == OpKind::kAGGemm) {
    return signal_count(schedule.spec.comm) + (setup_.offers > 0 ? setup_.signals : 0);
  }
  const Kernel& kernel = *kernels_.at(0);
  // The pad has that many words, so they can be counted in an int.
  const auto flags =
      static_cast<int>(flag_count(ScatterTiling{schedule.spec.problem.m, schedule.spec.problem.n,
                                                setup_.world, kernel.tile_m(), kernel.tile_n()}));
  return schedule.spec.copied ? setup_.signals + flags : flags;
}

void CudaOp::begin_captured(const Schedule& schedule, Stream stream) {
  follow_capture(stream);
  const Kernel& kernel = *kernels_.at(0);
  FluxMeetArgs entry = meeting(words_->entries);
  entry.advance = 1;
  entry.reset = pointer<std::uint32_t>(words_->signals[setup_.rank]);
  entry.reset_count = words_in_use(schedule);
  // In a ReduceScatter, tiles await the entries of their owners; copies cannot.
  const bool copies = schedule.spec.tiles.op == OpKind::kAGGemm || schedule.spec.copied ||
                      is_exchange(schedule.spec.problem.op);
  const bool behind = read_by_peers(schedule);
  if (!copies && !(behind && setup_.poison)) entry.awaited = nullptr;
  if (!behind) fill_with_nan(stream);
  zero_sums(stream);
  kernel.meet(entry, stream);
  if (behind) fill_with_nan(stream);
}

// Calls of one capture run one after the other, like eager calls. Between captures no order is
// possible.
void CudaOp::follow_capture(Stream stream) {
  if (capture_ == last_capture_ && stream != captured_stream_) {
    driver_->await_event(stream, captured_end_);
  }
  last_capture_ = capture_;
  captured_stream_ = stream;
}

}  // namespace flux::host
