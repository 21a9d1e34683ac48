// A tile schedule: everything one rank does in one call of a fused op, as plain data.
//
// It is built once per (problem, knobs, rank) from the maps of csrc/core. flux.TileSchedule
// displays it. The engine (engine.h) and the CPU backend execute it.
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
  // Partials cross a link of their receiver (GPUs): ranks of a host store to different receivers.
  bool spread = false;
  // Path medium on GPUs: a GEMM of its own for the rows of each rank.
  bool split = false;
  // ReduceScatter on GPUs: partials go to own memory, from which copy engines take those of a rank.
  bool copied = false;
  // Path in_kernel on GPUs: the kernel moves the rows, and there are no transfers of streams.
  bool in_kernel = false;
  // GPUs, ReduceScatter: the GEMM's kernel sums the own rows, and no reduction follows.
  bool sums_in_kernel = false;
  std::vector<int> rows = {};  // all-to-all: of each rank
};

// One move of a communication tile. AllGather: rows of x. ReduceScatter: rows of a partial result.
// Second phase of GemmAR: rows of the reduced result. `src == dst` marks a tile that stays on its
// rank: an own AllGather tile that is made visible to pulling peers, or the own share of a
// reduction.
struct Transfer {
  int step;
  int src;
  int dst;
  int chunk;  // the owner of the rows
  int tile;
  Range rows;      // of the [M, ...] matrix
  int signal;      // raised in dst's pad; a pulled result of GemmAR awaits it in src's pad instead
  bool forwarded;  // src is not the owner, and must receive the tile first
  int block = -1;  // ReduceScatter: the block of partials that holds it, see Home
};

// Destination of a rank's partial rows for one owner: a block in the symmetric memory of `holder`.
// With block -1 it is the rank's own output.
struct Home {
  int holder;
  int block;
};

// One contribution to a reduction. `block` lies in this rank's memory (push) or in the source's
// memory (pull). Block -1 is this rank's own partial, at the place where the GEMM wrote it.
struct Share {
  int source;  // the rank that raises `signal` in the own pad
  int signal;
  int block;
};

// The sum of one tile over a group of ranks, in rank order. A sum of all ranks goes to the own
// output, and `target` is this rank. A sum of the ranks of one host goes to a block of the owner's
// memory.
struct Reduction {
  int owner;
  int tile;
  Range rows;
  std::vector<Share> shares;
  int target;
  int signal;  // raised in target's pad; an own sum raises it for GemmAR, pull only
  int block;   // in target's memory; -1 is the own output
};

// One tile that is sent to a rank on another host. Lists of parcels are in sending order. Both ends
// derive the same list from the sender's schedule.
enum class ParcelKind : int { kGather = 0, kPartial = 1, kCombined = 2, kResult = 3 };
struct Parcel {
  ParcelKind kind;
  int chunk;
  Range rows;
  int signal;  // in the receiver's pad
  int block;   // in the receiver's memory; partials only
};

// One GEMM tile: rows x columns of the local output. All-to-all: `owner` is the rank that a block
// goes to (`completes`) or comes from (`waits`); without columns rows are copied, not multiplied.
struct Visit {
  Range rows;
  Range cols;
  Range waits;      // AllGather: signals of the own pad; empty when all rows are the rank's own
  int owner;        // ReduceScatter: owner of all rows, or -1 when they belong to several
  Range completes;  // ReduceScatter: transfers (indices) whose last part this tile computes
};

// One step of the communication side of a rank. Schedule::program has the steps in order.
enum class ActionKind : int {
  kGather = 0,   // AllGather: move transfers[index]
  kSend = 1,     // ReduceScatter, staged: move transfers[index]
  kReduce = 2,   // do reductions[index]
  kResult = 3,   // GemmAR: move results[index]
  kReceive = 4,  // GemmAR, push: copy receipts[index] from the symmetric buffer
};
struct Action {
  ActionKind kind;
  int index;
};

// Symmetric memory that a call addresses on every rank. It is the same on all ranks.
struct Needs {
  int signals = 0;      // in each pad
  int blocks = 0;       // of partials
  int block_rows = 0;   // in a block
  int result_rows = 0;  // gathered rows (AllGather), or rows of the result (GemmAR)
};

struct Schedule {
  ScheduleSpec spec;
  Needs needs;
  std::vector<Visit> visits;
  std::vector<Transfer> transfers;  // in the order in which this rank moves them
  std::vector<Transfer> results;    // GemmAR only: tiles of the reduced result that this rank moves
  std::vector<Transfer> receipts;   // GemmAR, push only: tiles of the result that peers push here
  std::vector<Reduction> reductions;  // ReduceScatter, in the order in which they are done
  std::vector<Home> homes;            // ReduceScatter, by owner
  std::vector<Action> program;
  std::vector<int> sequence;   // tiles.sequence points here when it is used
  std::vector<int> supplier;   // by chunk (of the result): the rank its tiles come from
  bool publishes_own = false;  // AllGather: own rows are copied into the own gathered buffer
};

// Symmetric memory that a ReduceScatter needs on every rank, for any M.
struct Room {
  int blocks;   // of partials, of one chunk each
  int regions;  // groups of W signals for partials in the pad
};
Room room_for(Order order, Direction direction, const Mesh& mesh, const std::vector<int>& hosts);

// Throws std::invalid_argument, naming the operand values, when the specification is illegal.
Schedule build_schedule(const ScheduleSpec& spec);

// AllGather: chunks that reach `rank`, in order, with the ranks that they come from.
std::vector<Hop> arrivals(const ScheduleSpec& spec, int rank);

// Tiles that this rank sends to `peer`, a rank on another host.
std::vector<Parcel> parcels_for(const Schedule& schedule, int peer);

}  // namespace flux::host
