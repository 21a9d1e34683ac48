// How stand-in kernels end an AllReduce: csrc/cuda/gemm/all_reduce.cuh once more, on the emulated GPU.
#pragma once

#include <cmath>
#include <vector>

#include "cuda/arguments.h"
#include "emulated_math.h"
#include "emulated_sync.h"
#include "gpu/device.h"

namespace emulated {

using namespace flux;

// The end of a call that ends in its kernel: units behind those of the tiles are sums, then copies.
struct Ending {
  SumTargets sums;
  std::uint32_t number = 0;  // once the launch has begun
  bool silent = false;

  int own_sums() const { return sum_count(sums.tiling, sums.rank); }
  int units() const { return own_sums() + copy_count(sums.tiling); }

  // Where the first block begins.
  void begin() {
    if (number != 0) return;
    number = ++sums.to.counts[FLUX_SUM_CALLS];
    silent = __atomic_load_n(sums.sync.status, __ATOMIC_ACQUIRE) != 0;
  }

  void open(int unit, std::vector<Wait>* waits) const {
    const ScatterTiling& s = sums.tiling;
    if (unit < own_sums()) {
      const Piece piece = sum_of_owner(s, sums.rank, unit);
      for (int source = 0; source < s.world; ++source) {
        const int row = piece.begin / s.tile_m;
        const int flag = flag_index(s, source, sums.rank, row, piece.column);
        waits->push_back({sums.to.words, flag, number, "flag", FLUX_WAIT_PARTIAL, row});
      }
      return;
    }
    const Piece piece = copied_piece(s, unit - own_sums());
    for (int row = piece.begin; row < piece.end; ++row) {
      const int owner = owner_of(s.m, s.world, row);
      if (owner == sums.rank || !begins_sum(s, row)) continue;
      const std::uint32_t* word = sums.to.sums[sums.rank] + sum_word(s, row, piece.column);
      waits->push_back({word - owner, owner, number, "word", FLUX_WAIT_RESULT, row / s.tile_m});
    }
  }

  void close(int unit, bool complete, Place where) const {
    const ScatterTiling& s = sums.tiling;
    const bool adds = unit < own_sums();
    const Piece piece =
        adds ? sum_of_owner(s, sums.rank, unit) : copied_piece(s, unit - own_sums());
    const std::uint64_t began = now();
    dawdle();
    for (int row = piece.begin; row < piece.end; ++row) {
      if (!adds && owner_of(s.m, s.world, row) == sums.rank) continue;
      const int end = min_of((piece.column + 1) * s.tile_n, s.n);
      for (int column = piece.column * s.tile_n; column < end; ++column) {
        const std::int64_t at = std::int64_t{row} * s.n + column;
        const auto* put = static_cast<const std::uint16_t*>(sums.to.put) + at;
        const std::uint16_t value = !complete ? to_bf16(std::nanf(""))
                                    : adds    ? sum(row, column)
                                              : *put;
        for (int rank = 0; rank < s.world; ++rank) {
          if (rank != sums.rank && (!adds || !complete)) continue;
          auto* const to = static_cast<std::uint16_t*>(sums.to.outs[rank]) + at;
          write(reinterpret_cast<std::uintptr_t>(to), &value, sizeof(value));
        }
      }
    }
    for (int rank = 0; adds && complete && rank < s.world; ++rank) {
      if (rank == sums.rank) continue;
      store(sums.to.sums[rank] + sum_word(s, piece.begin, piece.column), number);
    }
    tell(sums.sync, began, adds ? FLUX_TRACE_SUM : FLUX_TRACE_COPY, piece.begin, piece.column,
         piece.end - piece.begin, where);
  }

  std::uint16_t sum(int row, int column) const {
    const ScatterTiling& s = sums.tiling;
    const std::int64_t at = (row - row_begin(s.m, s.world, sums.rank)) * sums.ld + column;
    float sum = 0;
    for (int source = 0; source < s.world; ++source) {
      sum += to_float(static_cast<const std::uint16_t*>(sums.to.partials[source])[at]);
    }
    sum *= sums.to.scale;
    if (sums.bias != nullptr) sum += to_float(static_cast<const std::uint16_t*>(sums.bias)[column]);
    return to_bf16(sum);
  }
};

}  // namespace emulated
