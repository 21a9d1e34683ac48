// The part of a call that serves ranks of other nodes (docs/kernels/protocol.md, "Several nodes").
//
// ReduceScatter: the partials of a node for a rank of another node are added up, and the owner's
// twin in the node sends the sum. Meanwhile the GEMM computes the next tiles (Flux paper, 4.2:
// AllToAll between nodes, discrete reduction). 2 nodes x 2, rows of rank 2:
//
//   rank 0 (holder)  slot (1, 0): own    slot (1, 1): of rank 1  --sum, in slot (1, 0)--> inbox of rank 2
//   rank 1           ------------------------^
//   rank 2           slot (1, 0): own    slot (1, 1): of rank 3    inbox 0    -- sum --> rows of rank 2
//
// If the device itself can put (Relay), a kernel sums and sends: cuda_op_relay.cpp.
//
// GemmAR: sums go directly to the own node, and to the twins, which forward them in their nodes.
//
// Tiles and phases have the same order on all ranks. In phase h a rank sends to the node h places
// ahead and receives from the node h places behind. Buffers and their reuse: docs/kernels/protocol.md.
#include "cuda_host/cuda_op.h"

namespace flux::host {

// Offset at which the holder of `owner` has the partial of the rank at `lane` of its node.
std::int64_t CudaOp::partial_of(int owner, int lane) const {
  return slot(owner / lanes() * lanes() + lane);
}

// Offset at which a rank of node `at` has the sum that comes from `node`.
std::int64_t CudaOp::inbox_of(int node, int at) const {
  return slot(setup_.world + (node < at ? node : node - 1));
}

// The network's stream is ordered after the copy of own rows, but not after the kernel.
void CudaOp::gather_rows(const Schedule& schedule) {
  std::vector<std::int64_t> parts{0}, row_bytes{setup_.row_bytes};
  if (setup_.scales_travel) {
    parts.push_back(setup_.rest_offset);
    row_bytes.push_back(sizeof(float));
  }
  const FluxMeetArgs wait = rows_wait();
  gather_from_nodes(*driver_, *setup_.remote, schedule,
                    NetworkCall{network_stream_, epoch_, neighbours(), parts, row_bytes,
                                words_->signals, words_->offers, streams_.get(), *kernels_.at(0),
                                setup_.shared ? nullptr : &wait});
}

// -- ReduceScatter ---------------------------------------------------------------------------------

// Comes after the fork of the call and runs beside the GEMM.
void CudaOp::send_sums(const Schedule& schedule, int n) {
  driver_->await_event(network_stream_, forked_);
  setup_.remote->open(network_stream_, epoch_);
  if (relay()) return relay_sums(schedule, n);
  for (int ahead = 1; ahead < setup_.nodes; ++ahead) {
    for (int tile = 0; tile < tiles_per_chunk(schedule.spec.comm); ++tile) {
      send_sum(schedule, tile, ahead, n);
    }
  }
}

void CudaOp::send_sum(const Schedule& schedule, int tile, int ahead, int n) {
  const CommTiling& c = schedule.spec.comm;
  const int to = wrap(node() + ahead, setup_.nodes), from = wrap(node() - ahead, setup_.nodes);
  const auto box = [&](int sender) { return sender * tiles_per_chunk(c) + tile; };
  const auto offset = [&](Range rows, int owner) {
    return (rows.begin - row_begin(c.m, c.world, owner)) * setup_.row_bytes;
  };
  const auto bytes = [&](Range rows) {
    return static_cast<std::size_t>((rows.end - rows.begin) * setup_.row_bytes);
  };
  std::vector<Move> moves;
  const Range sent = comm_tile_rows(c, twin(to), tile);
  if (sent.begin < sent.end) {
    sum_of_node(schedule, twin(to), sent, n);
    const std::int64_t within = offset(sent, twin(to));
    moves.push_back({Move::kSend, twin(to), partial_of(twin(to), setup_.rank % lanes()) + within,
                     inbox_of(node(), to) + within, bytes(sent), box(node())});
  }
  const Range got = comm_tile_rows(c, setup_.rank, tile);
  if (got.begin < got.end) {
    const std::int64_t at = inbox_of(from, node()) + offset(got, setup_.rank);
    moves.push_back({Move::kReceive, twin(from), at, 0, bytes(got), box(from)});
  }
  exchange(moves);
}

// Adds up the node's partials of some of the owner's rows in the own slot. A rank that is alone on
// its node only waits for its own partials.
void CudaOp::sum_of_node(const Schedule& schedule, int owner, Range rows, int n) {
  FluxReduceArgs args = reduce_args(schedule, n);
  const std::int64_t within =
      (rows.begin - row_begin(args.m, args.world, owner)) * setup_.row_bytes;
  args.rank = owner;
  args.sync.launch = static_cast<std::uint32_t>(owner);
  args.first_row = rows.begin;
  args.rows = rows.end - rows.begin;
  args.slot_count = lanes();
  for (int lane = 0; lane < lanes(); ++lane) {
    const Address slot = setup_.data[setup_.rank] + partial_of(owner, lane) + within;
    args.slots[lane] = pointer<const void>(slot);
    if (lane == setup_.rank % lanes()) args.outs[0] = pointer<void>(slot);
  }
  args.flags =
      pointer<const std::uint32_t>(words_->signals[setup_.rank] + region_of(owner) * kWord);
  args.scale = 1.0f;
  args.out_count = lanes() > 1 ? 1 : 0;
  args.most_blocks = setup_.beside;
  kernels_.at(0)->reduce(args, network_stream_);
}

// Sets the owner's summands, in the order of the nodes: its own node's partials, other nodes' sums.
void CudaOp::reduce_nodes(FluxReduceArgs* args) const {
  args->slot_count = 0;
  const auto add = [&](std::int64_t at) {
    args->slots[args->slot_count++] = pointer<const void>(setup_.data[setup_.rank] + at);
  };
  for (int from = 0; from < setup_.nodes; ++from) {
    if (from != node()) {
      add(inbox_of(from, node()));
      continue;
    }
    for (int lane = 0; lane < lanes(); ++lane) add(partial_of(setup_.rank, lane));
  }
}

// -- AllReduce -------------------------------------------------------------------------------------

// Comes after the own rows of the result on `stream`. `stream` continues when the node has all rows
// of all twins of this rank.
void CudaOp::share_result(const Schedule& schedule, Stream stream) {
  join(network_stream_, stream);
  join(copy_stream_, stream);
  std::vector<MemOp> entered;  // their copies of the last call's result are over
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    if (peer == setup_.rank) continue;
    entered.push_back({MemOp::kWait, words_->entries[setup_.rank] + peer * kWord, epoch_});
  }
  driver_->memory_ops(copy_stream_, entered);
  for (int ahead = 1; ahead < setup_.nodes; ++ahead) {
    for (int tile = 0; tile < tiles_per_chunk(schedule.spec.comm); ++tile) {
      share_tile(schedule, tile, ahead);
    }
  }
  join(stream, network_stream_);
  join(stream, copy_stream_);
}

// Boxes of results come behind those of sums.
int CudaOp::result_box(const CommTiling& c, int sender, int tile) const {
  const int of_sums = setup_.nodes * (relay() ? setup_.strips : tiles_per_chunk(c));
  return of_sums + sender * tiles_per_chunk(c) + tile;
}

void CudaOp::share_tile(const Schedule& schedule, int tile, int ahead) {
  const CommTiling& c = schedule.spec.comm;
  const int to = wrap(node() + ahead, setup_.nodes), from = wrap(node() - ahead, setup_.nodes);
  std::vector<Move> moves;
  const auto add = [&](Move::Kind kind, int peer, Range rows, int sender) {
    if (rows.begin == rows.end) return;
    const std::int64_t at = setup_.rest_offset + rows.begin * setup_.row_bytes;
    moves.push_back({kind, peer, at, at,
                     static_cast<std::size_t>((rows.end - rows.begin) * setup_.row_bytes),
                     result_box(c, sender, tile)});
  };
  const Range got = comm_tile_rows(c, twin(from), tile);
  add(Move::kSend, twin(to), comm_tile_rows(c, setup_.rank, tile), node());
  add(Move::kReceive, twin(from), got, from);
  exchange(moves);
  if (got.begin == got.end) return;
  join(copy_stream_, network_stream_);
  const Move& came = moves.back();
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    if (peer == setup_.rank) continue;
    const auto what = [&] {
      const auto bytes = static_cast<std::int64_t>(came.bytes);
      return record_of(Work::kCopy, epoch_, peer, twin(from), tile, got, peer, -1, bytes);
    };
    stamped(streams_.get(), copy_stream_, what, [&] {
      driver_->copy(copy_stream_, setup_.data[peer] + came.at, setup_.data[setup_.rank] + came.at,
                    came.bytes);
    });
  }
}

}  // namespace flux::host
