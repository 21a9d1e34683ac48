// All-to-all: each rank has a block of rows for each other rank, and receives one from each.
//
//   GemmAllToAll   x [own, K] x w [N, K]: the block for a rank has the own rows, and the columns
//                  (heads) that the rank takes. Blocks are computed one after the other, and leave.
//   AllToAllGemm   x [all rows, own heads]: the block for a rank has its rows. Each block that
//                  arrives is a slab of K; its product is added to the result of the own rows.
//
// M = W * c virtual rows, c rows for each block: `rows` of rank q begin at q * c. Rank r of 4,
// GemmAllToAll; >q: the block for q, <q: that of q.
//
//   1 host              GEMM >1 | GEMM >2 | GEMM >3 | GEMM own | place <3 | place <2 | place <1
//   2 hosts 0 1 | 2 3   GEMM >2 | GEMM >3 | GEMM >1 | GEMM own | place <1 | <3 | <2
//
// AllToAllGemm of rank 0: copy >2, >3, >1 | GEMM own | GEMM <1 | GEMM <3, <2 tile by tile.
//
// Blocks between hosts travel in tiles of `comm.rows` rows, blocks inside a host as one. A rank
// sends before it waits for anything but entries, so no order of calls of the ranks can deadlock.
//
// Buffers. Each rank has W - 1 blocks of symmetric memory, and block q' is written by one rank
// alone. Call e + 1 may overwrite what call e read: a rank enters e + 1 after it has read all of e,
// and no rank writes before it has seen all entries (docs/contribute/architecture.md). Signals are
// those of GemmRS: (source, tile), in the pad of the rank that receives.
#pragma once

#include "schedule/schedule.h"

namespace flux::host {

inline bool is_exchange(OpKind op) {
  return op == OpKind::kGemmAllToAll || op == OpKind::kAllToAllGemm;
}

// Throws std::invalid_argument if the specification of an all-to-all is illegal.
void check_exchange(const ScheduleSpec& spec);

// Fills visits, transfers, homes and suppliers.
void build_exchange(Schedule* schedule);

}  // namespace flux::host
