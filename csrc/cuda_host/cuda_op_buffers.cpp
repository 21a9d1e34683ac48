// Gathered rows in two buffers: what stands in front of an AllGather's kernel leaves its stream.
//
//   stream       kernel: own rows of x, wait, multiply ... | join
//   copy stream  await entry e - 1 of d, rows -> buffer e % 2 of d, signal at d ... | entry e -> all
//
// Call e uses the buffer, and the signals, of e's parity. So a peer may write rows of call e as soon as
// this rank has ended call e - 2, which its entry of call e - 1 says: a credit, given a call ahead. Entries
// are raised behind the copies and awaited a call later, so that no call waits for either.
//
// Where a rank cannot tell that the call before was its peers' last one, an entry is raised ahead of the
// call, and rows await it, as with one buffer: at the first call, behind a set number, and when words are
// renewed. And for good when calls have been captured, since replays use buffer 0 whenever they come.
#include "cuda_host/cuda_op.h"

namespace flux::host {

namespace {

// Words are compared by signed difference: a word older than 2^31 calls would look new.
constexpr std::uint32_t kRenewEvery = 1u << 30;
constexpr Address kLoadBytes = 16;  // that kernels load at once

}  // namespace

void CudaOp::set_epoch(std::uint32_t epoch) {
  follows_ = follows_ && epoch == epoch_;
  epoch_ = epoch;
}

bool CudaOp::renews_words() const { return epoch_ % kRenewEvery == 0; }

bool CudaOp::has_credit() const {
  return setup_.second_offset != 0 && follows_ && last_capture_ == 0 && !renews_words();
}

// On the copy stream by credit, else on the call's. That comes behind entries on the copy stream, for they
// must not be overtaken.
void CudaOp::enter(Stream stream) {
  if (setup_.second_offset != 0 && stream != copy_stream_) join(stream, copy_stream_);
  put_traced(stream, Work::kEnter, raise_in_node(words_->entries, entries()));
}

// Every call writes entries and words of GemmAR. Only calls of a certain M write a signal or flag,
// so signals and flags are renewed.
void CudaOp::renew_signals(Stream stream) {
  driver_->fill(stream, eager_[0].signals[setup_.rank], epoch_ - 1,
                static_cast<std::size_t>(setup_.signals + setup_.offers));
  if (setup_.second_offset != 0) {
    driver_->fill(stream, eager_[1].signals[setup_.rank], epoch_ - 1,
                  static_cast<std::size_t>(setup_.signals));
  }
  if (setup_.remote) setup_.remote->renew(stream, epoch_);
}

// Leaves out sums that the device puts: a put of the last call may still read them. By credit, peers
// write to the buffer of this call already, and to the next call's behind the entry that follows.
void CudaOp::fill_with_nan(Stream stream) {
  if (!setup_.poison) return;
  for (int buffer = 0; buffer <= (setup_.second_offset != 0 && capture_ == 0 ? 1 : 0); ++buffer) {
    if (by_credit_ && buffer == buffer_of(epoch_)) continue;
    driver_->fill(stream, gathered_[buffer][setup_.rank], 0xFFFFFFFFu, setup_.sums_offset / kWord);
  }
}

// Whether kernels read the own rows where the user has them, so that they are not copied: if nothing else
// reads them in the gathered rows, and no tile reads rows of a peer as well.
bool CudaOp::own_in_place(const Schedule& schedule, const Rows& x,
                          const std::vector<Operand>& operands, bool collects) const {
  if (pulls(schedule) || setup_.remote || setup_.scales_travel || collects) return false;
  if (groups_.items != nullptr) return false;  // kernels of experts gather all rows by one index
  if ((x.x | static_cast<Address>(setup_.row_bytes)) % kLoadBytes != 0) return false;
  if (schedule.spec.split) return true;
  const int m = schedule.spec.problem.m;
  const int begin = row_begin(m, setup_.world, setup_.rank);
  const int end = row_end(m, setup_.world, setup_.rank);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const int tile = kernels_.at(i)->tile_m();
    const bool whole = begin % tile == 0 && (end % tile == 0 || end == m);
    if (operands[i].n > 0 && begin < end && !whole) return false;
  }
  return true;
}

}  // namespace flux::host
