// Which rank owns which rows of the [M, ...] matrix, for any M >= 1, divisible by the world or not.
//
// Rank r owns rows [r*ceil(M/W), min(M, (r+1)*ceil(M/W))), possibly none. For W = 4:
//
//   M = 8   | 0 0 | 1 1 | 2 2 | 3 3 |
//   M = 7   | 0 0 | 1 1 | 2 2 | 3 |          the last owner is short
//   M = 5   | 0 0 | 1 1 | 2 |                rank 3 owns nothing
//   M = 1   | 0 |                            ranks 1, 2, 3 own nothing
//
// Only the last non-empty chunk can be short, and only empty chunks follow it. Signal ranges rely
// on this (signal.h): a contiguous range of rows never has a missing signal in its middle.
#pragma once

#include "core/problem.h"

namespace flux {

// Rows of a full chunk. M = 7, W = 4: 2.
FLUX_HD constexpr int chunk_rows(int m, int world) { return ceil_div(m, world); }

// First row of rank r. M = 7, W = 4:  r = 0 1 2 3  ->  0 2 4 6.   M = 5:  0 2 4 5.
FLUX_HD constexpr int row_begin(int m, int world, int rank) {
  return min_of(m, rank * chunk_rows(m, world));
}

// One past the last row of rank r. M = 7, W = 4:  2 4 6 7.   M = 5:  2 4 5 5.
FLUX_HD constexpr int row_end(int m, int world, int rank) {
  return min_of(m, (rank + 1) * chunk_rows(m, world));
}

// Number of rows of rank r. M = 7, W = 4:  2 2 2 1.   M = 5:  2 2 1 0.
FLUX_HD constexpr int row_count(int m, int world, int rank) {
  return row_end(m, world, rank) - row_begin(m, world, rank);
}

// Owner of a row. M = 7, W = 4:  row 0 1 2 3 4 5 6  ->  0 0 1 1 2 2 3.
FLUX_HD constexpr int owner_of(int m, int world, int row) { return row / chunk_rows(m, world); }

// Columns and depth of the GEMM that one rank executes; N (AllGather) or K is divided as rows are.
// N = K = 7, W = 4:
//   AGGemm       [M, 7] x [n, 7], n = 2 2 2 1      GemmRS/AR    [M, k] x [7, k], k = 2 2 2 1
FLUX_HD constexpr int local_n(const Problem& p, int rank) {
  return p.op == OpKind::kAGGemm ? row_count(p.n, p.world, rank) : p.n;
}
FLUX_HD constexpr int local_k(const Problem& p, int rank) {
  const bool reduces = p.op == OpKind::kGemmRS || p.op == OpKind::kGemmAR;
  return reduces ? row_count(p.k, p.world, rank) : p.k;
}

}  // namespace flux
