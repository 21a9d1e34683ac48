// A tile schedule: everything one rank does in one call of a fused op, as plain data.
//
// Built once per (problem, knobs, rank) from the maps of csrc/core, shown to people by
// flux.TileSchedule and executed by the engine (engine.h) and the CPU backend.
#pragma once

#include <vector>

#include "core/signal.h"
#include "core/tile_order.h"
#include "schedule/routes.h"

namespace flux::host {

enum class Store : int { kDirect = 0, kStaged = 1 };

struct ScheduleSpec {
  Problem problem;
  TileOrder tiles;
  CommTiling comm;
  Store store;                  // GemmRS and GemmAR only
  std::vector<int> hosts = {};  // host of each rank, where they form no mesh; else empty
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
  int block = -1;  // ReduceScatter: the block of partials it lies in, see Home
};

// Where a rank's partial rows of one owner go: a block in the symmetric memory of `holder`, or, for
// block -1, the rank's own output.
struct Home {
  int holder;
  int block;
};

// One contribution to a reduction. `block` is in the own memory (push) or the source's (pull); -1 is
// the own partial, wherever the GEMM left it.
struct Share {
  int source;  // the rank that raises `signal` in the own pad
  int signal;
  int block;
};

// The sum of one tile over a group of ranks, in rank order: of all ranks into the own output (target
// is the rank itself), or of the ranks of a host into a block of the owner's memory.
struct Reduction {
  int owner;
  int tile;
  Range rows;
  std::vector<Share> shares;
  int target;
  int signal;  // raised in target's pad; the own result's for GemmAR, pull
  int block;   // in target's memory; -1 is the own output
};

// One tile on its way to a rank on another host, in the order in which it leaves. Both ends derive
// the same list from the sender's schedule.
enum class ParcelKind : int { kGather = 0, kPartial = 1, kCombined = 2, kResult = 3 };
struct Parcel {
  ParcelKind kind;
  int chunk;
  Range rows;
  int signal;  // in the receiver's pad
  int block;   // in the receiver's memory; partials only
};

// One GEMM tile: rows x columns of the local output.
struct Visit {
  Range rows;
  Range cols;
  Range waits;      // AllGather: signals of the own pad; empty when all rows are the rank's own
  int owner;        // ReduceScatter: owner of all rows, or -1 when they belong to several
  Range completes;  // ReduceScatter: transfers (indices) whose last part this tile computes
};

// Work of the communication side of a rank, in this order.
enum class ActionKind : int {
  kGather = 0,   // AllGather: move transfers[index]
  kSend = 1,     // ReduceScatter, staged: move transfers[index]
  kReduce = 2,   // do reductions[index]
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
  std::vector<Reduction> reductions;  // ReduceScatter, in the order in which they are done
  std::vector<Home> homes;            // ReduceScatter, by owner
  std::vector<Action> program;
  std::vector<int> sequence;   // tiles.sequence points here when it is used
  std::vector<int> supplier;   // the rank that hands us the tiles of each chunk (of the result)
  bool publishes_own = false;  // AllGather: own rows are copied into the own gathered buffer
};

// Symmetric memory that a ReduceScatter needs of every rank, for any M.
struct Room {
  int blocks;   // of partials, of one chunk each
  int regions;  // groups of W signals for partials in the pad
};
Room room_for(Order order, Direction direction, const Mesh& mesh, const std::vector<int>& hosts);

// Throws std::invalid_argument, naming the operand values, when the specification is illegal.
Schedule build_schedule(const ScheduleSpec& spec);

// Tiles that leave for `peer`, when it is on another host.
std::vector<Parcel> parcels_for(const Schedule& schedule, int peer);

// Signals that an op needs in each pad: one group per region of partials, one for the result.
int signals_needed(const ScheduleSpec& spec);

}  // namespace flux::host
