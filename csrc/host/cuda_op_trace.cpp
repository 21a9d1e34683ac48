// What a CudaOp tells a trace (stream_trace.h, cuda/trace.cuh). Nothing here runs while nobody traces.
#include <stdexcept>

#include "host/cuda_op.h"

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

void CudaOp::put_traced(Stream stream, Work work, const std::vector<MemOp>& ops) {
  stamped(streams_.get(), stream, told(work, epoch_), [&] { driver_->memory_ops(stream, ops); });
}

// On the network's stream; both ends of a move call it by the receiver's word for it.
void CudaOp::exchange(const std::vector<Move>& moves) {
  const int token =
      traced() && !moves.empty() ? streams_->begin(network_stream_) : StreamTrace::kNone;
  setup_.remote->exchange(network_stream_, moves, epoch_);
  if (token == StreamTrace::kNone) return;
  std::vector<Record> parts;
  for (const Move& m : moves) {
    const bool sends = m.kind == Move::kSend;
    parts.push_back(told(sends ? Work::kSend : Work::kReceive, epoch_, m.peer, -1, -1, {0, 0},
                         sends ? m.peer : setup_.rank, m.box, static_cast<std::int64_t>(m.bytes)));
  }
  streams_->end(token, network_stream_, parts);
}

}  // namespace flux::host
