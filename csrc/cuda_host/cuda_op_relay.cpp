// ReduceScatter between nodes where the device itself puts (Relay). A kernel beside the GEMM adds
// up the node's partials for its twins on other nodes, strip by strip. It puts each strip to its
// owner, with a word behind it. The owner's sum awaits these words. cuda/runtime/relay.cuh has the
// kernels, and the argument for what they read and write. docs/kernels/protocol.md has the argument for the
// call. 2 nodes x 2, rows of rank 2:
//
//   network of rank 0    fork | open -> twin | relay: rank 2 has opened? flags of a strip? sum, put | ...
//   caller's of rank 2   GEMM | join of its own relay | flags of its node, word of the strip? sum | ...
//
// Order of later work on the streams:
//   The caller's stream joins the relay before the sum, and so before the next entry. That entry lets
//   the node write to the slots that the relay reads. There is a second reason: sums fill the device
//   with blocks that wait for relays of other nodes. A relay that found no free multiprocessor would
//   be waited for in turn. The relay ends no later than the last tile of the node's GEMMs, so the join
//   costs next to nothing.
//   Puts may still be in progress after the relay has ended. They read `sum_for`. Only the next relay
//   writes there, after the owner has opened the next call. By then the owner has seen their words.
#include "core/relay.h"
#include "cuda_host/cuda_op.h"

namespace flux::host {

// Offset of the sum of this node that this rank puts to its twin on `node`.
std::int64_t CudaOp::sum_for(int node) const {
  return setup_.sums_offset + (node < this->node() ? node : node - 1) * setup_.slot_bytes;
}

// Owners come in the order in which the node's GEMMs compute their rows: see send_sums.
void CudaOp::relay_sums(const Schedule& schedule, int n) {
  const Address own = setup_.data[setup_.rank];
  FluxRelayArgs args{};
  args.dtype = setup_.dtype;
  args.m = schedule.spec.problem.m;
  args.n = n;
  args.world = setup_.world;
  args.tile_m = kernels_.at(0)->tile_m();
  args.tile_n = kernels_.at(0)->tile_n();
  args.blocks = setup_.beside;
  for (int rank = neighbours().begin; rank < neighbours().end; ++rank) {
    args.sources[args.source_count++] = rank;
  }
  args.slot_bytes = setup_.slot_bytes;
  for (int ahead = 1; ahead < setup_.nodes; ++ahead) {
    const int to = wrap(node() + ahead, setup_.nodes), owner = twin(to), place = args.owner_count++;
    args.owners[place] = owner;
    args.slots[place] = pointer<const void>(own + partial_of(owner, 0));
    args.flags[place] =
        pointer<const std::uint32_t>(words_->signals[setup_.rank] + region_of(owner) * kWord);
    args.staging[place] = pointer<void>(own + sum_for(to));
    args.to[place] = pointer<void>(own + inbox_of(node(), to));
    args.words[place] = relay()->box(node() * setup_.strips);
  }
  args.entries = relay()->opened();
  args.sync = sync(0);
  relay()->send(args, network_stream_);
}

// Sums this rank's rows as `sum` describes, after the words of other nodes' strips have arrived.
void CudaOp::add_up_nodes(const FluxReduceArgs& sum, Stream stream) const {
  FluxNodeSumArgs args{};
  args.sum = sum;
  args.dtype = setup_.dtype;
  for (int rank = neighbours().begin; rank < neighbours().end; ++rank) {
    args.sources[args.source_count++] = rank;
  }
  for (int from = 0; from < setup_.nodes; ++from) {
    if (from != node()) args.words[args.node_count++] = relay()->box(from * setup_.strips);
  }
  relay()->add_up(args, stream);
}

}  // namespace flux::host
