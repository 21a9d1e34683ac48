// Trace records of a CudaOp (stream_trace.h, cuda/trace.cuh). Nothing here runs without a trace.
#include <stdexcept>

#include "cuda_host/cuda_op.h"

namespace flux::host {

void CudaOp::trace(Address kernels, std::shared_ptr<StreamTrace> streams) {
  for (const auto& kernel : kernels_) {
    if (kernels != 0 && !kernel->traces()) {
      throw std::invalid_argument(kernel->name() + " is of no trace build");
    }
  }
  kernel_trace_ = kernels;
  streams_ = std::move(streams);
  whole_call_ = StreamTrace::kNone;
}

void CudaOp::refuse_traced_captures() const {
  if (capture_ != 0 && traced()) {
    throw std::invalid_argument("calls that are traced cannot be captured into a CUDA graph");
  }
}

void CudaOp::put_traced(Stream stream, Work work, const std::vector<MemOp>& ops) {
  stamped(
      streams_.get(), stream, [&] { return record_of(work, epoch_); },
      [&] { driver_->memory_ops(stream, ops); });
}

// Exchanges on the network's stream. In the trace, both ends of a move name it by the receiver's
// word.
void CudaOp::exchange(const std::vector<Move>& moves) {
  const auto parts = [&] {
    std::vector<Record> records;
    for (const Move& m : moves) {
      const bool sends = m.kind == Move::kSend;
      records.push_back(record_of(sends ? Work::kSend : Work::kReceive, epoch_, m.peer, -1, -1,
                                  {0, 0}, sends ? m.peer : setup_.rank, m.box,
                                  static_cast<std::int64_t>(m.bytes)));
    }
    return records;
  };
  stamped(moves.empty() ? nullptr : streams_.get(), network_stream_, parts,
          [&] { setup_.remote->exchange(network_stream_, moves, epoch_); });
}

}  // namespace flux::host
