// Which rows of a grouped GEMM belong to which rank: ownership (ownership.h) of tokens that experts
// share.
//
// A mixture of experts sends each of M tokens to some of its experts. The grouped GEMM has one
// *routed row* for each pair of a token and an expert of this rank, sorted by expert, then by token.
// Tokens are owned as rows are, in order, so the routed rows of an expert whose tokens a rank owns
// are one run, possibly empty. M = 4 tokens, W = 2, experts of the tokens 1 0 1 1:
//
//   routed row           0 |  1  2  3
//   expert               0 |  1  1  1
//   token                1 |  0  2  3
//   owner                0 |  0  1  1
//   offsets      0  1  1 |  2  4       by (expert, owner), and the end: runs [0,1) [1,1) [1,2) [2,4)
//
// Without offsets the map is uniform, as the rows of a dense GEMM are: one expert has every token.
#pragma once

#include <cstdint>

#include "core/signal.h"

namespace flux {

struct RowMap {
  int m;      // tokens
  int world;  // ranks that own them
  int experts;
  const int* offsets = nullptr;  // experts * world + 1; null: uniform
  const int* tokens = nullptr;   // by routed row; null: uniform
};

FLUX_HD constexpr int routed_rows(const RowMap& map) {
  return map.offsets == nullptr ? map.m : map.offsets[map.experts * map.world];
}

// Routed rows of one expert whose tokens one rank owns. In the example: (1, 1) -> [2, 4).
FLUX_HD constexpr Range run_of(const RowMap& map, int expert, int owner) {
  if (map.offsets == nullptr) {
    return {row_begin(map.m, map.world, owner), row_end(map.m, map.world, owner)};
  }
  const int at = expert * map.world + owner;
  return {map.offsets[at], map.offsets[at + 1]};
}

// All routed rows of one expert.
FLUX_HD constexpr Range rows_of_expert(const RowMap& map, int expert) {
  return {run_of(map, expert, 0).begin, run_of(map, expert, map.world - 1).end};
}

// First routed row of an expert whose token is not before `token`. O(1) where a chunk begins or ends;
// inside a chunk, a search through its run.
FLUX_HD constexpr int first_row_from(const RowMap& map, int expert, int token) {
  if (token >= map.m) return rows_of_expert(map, expert).end;
  if (map.offsets == nullptr) return token;
  const int owner = owner_of(map.m, map.world, token);
  Range run = run_of(map, expert, owner);
  if (token == row_begin(map.m, map.world, owner)) return run.begin;
  while (run.begin < run.end) {
    const int middle = run.begin + (run.end - run.begin) / 2;
    if (map.tokens[middle] < token) {
      run.begin = middle + 1;
    } else {
      run.end = middle;
    }
  }
  return run.begin;
}

// Routed rows of an expert whose tokens lie in a range. In the example: (1, tokens [0, 3)) -> [1, 3).
FLUX_HD constexpr Range routed_rows_of(const RowMap& map, int expert, Range tokens) {
  return {first_row_from(map, expert, tokens.begin), first_row_from(map, expert, tokens.end)};
}

}  // namespace flux
