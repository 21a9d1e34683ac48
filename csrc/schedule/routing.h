// The routing of one call of a grouped op: which experts each token goes to, sorted into the rows of
// the grouped GEMM (core/row_map.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/row_map.h"

namespace flux::host {

// Experts of M tokens, `topk` each, as the router chose them; below 0: that choice is dropped.
struct Choices {
  const std::int64_t* experts;  // [m, topk], dense
  int m;
  int topk;
  int total;  // experts of all ranks
};

struct Routing {
  std::vector<int> offsets;
  std::vector<int> tokens;            // by routed row
  std::vector<std::int64_t> choices;  // by routed row: token * topk + choice
  std::vector<std::int64_t> rows;     // [m, topk]: the routed row, -1: none on this rank
  std::uint32_t checksum = 0;         // of all choices; equal on ranks with equal choices
  RowMap map{};                       // points into this object, so that must not be copied

  Routing(const Choices& choices, int first_expert, int experts, int world);
  Routing(const Routing&) = delete;
  Routing& operator=(const Routing&) = delete;
};

}  // namespace flux::host
