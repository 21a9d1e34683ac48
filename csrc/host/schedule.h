// A tile schedule: everything one rank does in one call of a fused op, as plain data.
//
// Built once per (problem, knobs, rank) from the maps of csrc/core, shown to people by
// flux.TileSchedule and executed by the engine (engine.h) and the CPU backend.
#pragma once

#include <vector>

#include "core/signal.h"
#include "core/tile_order.h"

namespace flux::host {

enum class Store : int { kDirect = 0, kStaged = 1 };

struct ScheduleSpec {
  Problem problem;
  TileOrder tiles;
  CommTiling comm;
  Store store;  // GemmRS and GemmAR only
};

// One communication tile on its way. AllGather: rows of x; ReduceScatter: rows of a partial result;
// GemmAR's second phase: rows of the reduced result. `src == dst` marks a tile that stays at home:
// an own AllGather tile made visible to pulling peers, or the own share of a reduction.
struct Transfer {
  int step;
  int src;
  int dst;
  int chunk;  // whose rows
  int tile;
  Range rows;      // of the [M, ...] matrix
  int signal;      // raised in dst's pad, except for pulled partials (see schedule.cpp)
  bool forwarded;  // src is not the owner: it must have received the tile first
};

// One GEMM tile: rows x columns of the local output.
struct Visit {
  Range rows;
  Range cols;
  Range waits;      // AllGather: signals of the own pad; empty when all rows are the rank's own
  int owner;        // ReduceScatter: owner of all rows, or -1 when they belong to several
  Range completes;  // ReduceScatter: transfers (indices) whose last part this tile computes
};

// What the communication side of a rank does, in this order.
enum class ActionKind : int {
  kGather = 0,   // AllGather: move transfers[index]
  kSend = 1,     // ReduceScatter, staged: move transfers[index]
  kReduce = 2,   // reduce own tile `index`
  kResult = 3,   // GemmAR: move results[index]
  kReceive = 4,  // GemmAR, push: take receipts[index] out of the symmetric buffer
};
struct Action {
  ActionKind kind;
  int index;
};

struct Schedule {
  ScheduleSpec spec;
  std::vector<Visit> visits;
  std::vector<Transfer> transfers;  // in the order in which this rank moves them
  std::vector<Transfer> results;    // GemmAR only: tiles of the reduced result that this rank moves
  std::vector<Transfer> receipts;   // GemmAR, push only: tiles of the result that peers push to us
  std::vector<Action> program;
  std::vector<int> supplier;   // AllGather: the rank that hands us the tiles of each chunk
  bool publishes_own = false;  // AllGather: own rows are copied into the own gathered buffer
};

// Throws std::invalid_argument, naming the operand values, when the specification is illegal.
Schedule build_schedule(const ScheduleSpec& spec);

// Signals that an op needs in each pad: one region per phase.
inline int signals_needed(OpKind op, const CommTiling& comm) {
  return signal_count(comm) * (op == OpKind::kGemmAR ? 2 : 1);
}

}  // namespace flux::host
