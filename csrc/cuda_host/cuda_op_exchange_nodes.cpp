// All-to-alls of heads between nodes: each block goes from its rank straight to the other, as one message.
//
//   GemmAllToAll   network   open | per step: await flags of the columns of r + s | pack | exchange: block -> r + s,
//                            block of r - s -> its place | own signal ...
//   AllToAllGemm   network   open | per tile of rows and step: exchange: rows of r - s -> it, own rows of r + s ->
//                            staged | staged -> own columns of the gathered rows
//                  copy      per tile of rows: copies inside the node | join the network's stream | signal
//
// r: this rank. r + s: the rank at step s of the other nodes, which takes as many places among the nodes and
// among the ranks of a node from all. So at each step every rank sends to another one, and has a message.
// Step s is the same at both ends of a message, and all ranks take tiles and steps in one order. So by induction
// no exchange waits forever: it waits for exchanges of an earlier step, and in GemmAllToAll for tiles of the
// GEMM, which wait for nothing.
//
// Reuse. Blocks that arrive, and staged ones, are written behind `open`, which follows the fork of the call, and
// so its caller's reads and the joins of call e - 1. Packed blocks and own heads are read by exchanges of call
// e - 1 alone, which it has joined.
#include <algorithm>

#include "cuda_host/cuda_op.h"

namespace flux::host {

std::size_t CudaOp::block_bytes(int rows) const {
  return static_cast<std::size_t>(rows) * block_columns() * setup_.x_bytes;
}

void CudaOp::require_staged(const Schedule& schedule, int tiles) const {
  if (!setup_.remote) return;
  const int chunk = schedule.spec.problem.m / setup_.world, far = setup_.world - lanes();
  require("boxes for other nodes", std::int64_t{setup_.world} * tiles, setup_.boxes);
  require("rows of blocks of other nodes", std::int64_t{far} * chunk,
          (setup_.sums_offset - setup_.staged_offset) / static_cast<std::int64_t>(block_bytes(1)));
}

// Offset at which `rank` has the block for, or from, a rank of another node.
Address CudaOp::staged_block(const Schedule& schedule, int rank, int peer) const {
  const int chunk = schedule.spec.problem.m / setup_.world;
  const int place = peer < rank ? peer : peer - lanes();
  return setup_.staged_offset + place * block_bytes(chunk);
}

// The rank at a step of the other nodes: `sign` 1: r + s, -1: r - s.
int CudaOp::far_rank(int step, int sign) const {
  const int host = node() + sign * (1 + step / lanes());
  const int lane = setup_.rank + sign * (step % lanes());
  return wrap(host, setup_.nodes) * lanes() + wrap(lane, lanes());
}

void CudaOp::exchange_blocks(const Schedule& schedule, Address product) {
  const int rank = setup_.rank, world = setup_.world, own = schedule.spec.rows[rank];
  const Address data = setup_.data[rank];
  driver_->await_event(network_stream_, forked_);
  setup_.remote->open(network_stream_, epoch_);
  for (int step = 0; step < world - lanes(); ++step) {
    const int to = far_rank(step, 1), from = far_rank(step, -1);
    std::vector<Move> moves;
    if (own > 0) {
      const Address packed = staged_block(schedule, rank, to);
      await_columns(schedule, to, network_stream_);
      copy_block(network_stream_, to, data + packed, product, own, false);
      const auto there = static_cast<std::int64_t>(block_offset(schedule, rank));
      moves.push_back(
          {Move::kSend, to, static_cast<std::int64_t>(packed), there, block_bytes(own), rank});
    }
    const int rows = schedule.spec.rows[from];
    if (rows > 0) {
      const auto at = static_cast<std::int64_t>(block_offset(schedule, from));
      moves.push_back({Move::kReceive, from, at, 0, block_bytes(rows), from});
    }
    if (!moves.empty()) exchange(moves);
    const Address signal = words_->signals[rank] + from * kWord;
    driver_->memory_ops(network_stream_, {{MemOp::kWrite, signal, number()}});
  }
}

void CudaOp::fetch_from_nodes(const Schedule& schedule, int tile) {
  const int rank = setup_.rank, world = setup_.world;
  const int tile_rows = schedule.spec.comm.rows, first = tile * tile_rows;
  const int tiles = ceil_div(schedule.spec.problem.m / world, tile_rows);
  const auto rows_of = [&](int owner) {
    return std::max(0, std::min(tile_rows, schedule.spec.rows[owner] - first));
  };
  const Address data = setup_.data[rank];
  for (int step = 0; step < world - lanes(); ++step) {
    const int to = far_rank(step, -1), from = far_rank(step, 1);
    const int sent = rows_of(to), got = rows_of(rank);
    const Address staged = staged_block(schedule, rank, from) + block_bytes(first);
    std::vector<Move> moves;
    if (sent > 0) {
      const Address at = setup_.rest_offset + block_offset(schedule, to) + block_bytes(first);
      const Address there = staged_block(schedule, to, rank) + block_bytes(first);
      moves.push_back({Move::kSend, to, static_cast<std::int64_t>(at),
                       static_cast<std::int64_t>(there), block_bytes(sent), rank * tiles + tile});
    }
    if (got > 0) {
      moves.push_back({Move::kReceive, from, static_cast<std::int64_t>(staged), 0, block_bytes(got),
                       from * tiles + tile});
    }
    if (!moves.empty()) exchange(moves);
    if (got == 0) continue;
    copy_block(network_stream_, from, data + staged, data + first * setup_.row_bytes, got, true);
  }
}

}  // namespace flux::host
