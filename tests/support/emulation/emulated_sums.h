// How stand-in kernels sum by themselves: csrc/cuda/gemm/all_reduce.cuh once more, on the emulated GPU. A
// ReduceScatter's strips follow the tiles, as if no warp were idle beside them.
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

  bool stays() const { return sums.to.scatters != 0; }
  int own_sums() const {
    return stays() ? own_sum_count(sums.tiling, sums.rank) : sum_count(sums.tiling, sums.rank);
  }
  int units() const { return own_sums() + (stays() ? 0 : copy_count(sums.tiling)); }
  Piece own(int unit) const {
    return stays() ? own_sum(sums.tiling, sums.rank, sums.raster, unit)
                   : sum_of_owner(sums.tiling, sums.rank, unit);
  }

  // Where the first block begins.
  void begin() {
    if (number != 0) return;
    if (stays()) sums.sync.launch = static_cast<std::uint32_t>(sums.rank);
    number = stays() ? sums.sync.epoch : ++sums.to.counts[FLUX_SUM_CALLS];
    silent = !stays() && __atomic_load_n(sums.sync.status, __ATOMIC_ACQUIRE) != 0;
  }

  void open(int unit, std::vector<Wait>* waits) const {
    const ScatterTiling& s = sums.tiling;
    if (unit < own_sums()) {
      const Piece piece = own(unit);
      for (int source = 0; piece.begin < piece.end && source < s.world; ++source) {
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
    const Piece piece = adds ? own(unit) : copied_piece(s, unit - own_sums());
    const std::uint64_t began = now();
    dawdle();
    for (int row = piece.begin; row < piece.end; ++row) {
      if (!adds && owner_of(s.m, s.world, row) == sums.rank) continue;
      const int end = min_of((piece.column + 1) * s.tile_n, s.n);
      const int above = stays() ? row_begin(s.m, s.world, sums.rank) : 0;
      for (int column = piece.column * s.tile_n; column < end; ++column) {
        const std::int64_t at = std::int64_t{row - above} * s.n + column;
        const auto* put = static_cast<const std::uint16_t*>(sums.to.put) + at;
        const std::uint16_t value = !complete ? to_bf16(std::nanf(""))
                                    : adds    ? sum(row, column)
                                              : *put;
        for (int rank = 0; rank < s.world; ++rank) {
          if (rank != sums.rank && (stays() || !adds || !complete)) continue;
          auto* const to = static_cast<std::uint16_t*>(sums.to.outs[rank]) + at;
          write(reinterpret_cast<std::uintptr_t>(to), &value, sizeof(value));
        }
      }
    }
    for (int rank = 0; !stays() && adds && complete && rank < s.world; ++rank) {
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
