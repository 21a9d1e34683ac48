// Grouped GEMM + ReduceScatter in one kernel. Tiles of the GEMM write the products of
// routed rows to memory of this device. Then tiles of tokens sum them, weighted, in the order of the
// choices and in fp32, whatever order they come in, so that results repeat bit for bit; store the sums with
// the owners of the tokens; and raise the flags that the reduction awaits (cuda/gemm/reduce.cuh).
//
// Memory ordering (docs/kernels/protocol.md). After a tile's stores and a barrier, a thread for each row
// fences and counts the row at the tile of sums that awaits it. The sum's thread 0 acquires the count,
// and a barrier passes that on to the threads that read. No sum waits forever: it is claimed behind the
// tiles it awaits, which blocks that run have, and those wait for nothing.
#pragma once

#include "cuda/gemm/reduce.cuh"
#include "cuda_moe/grouped.cuh"

namespace flux {

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

template <class C>
struct SumTokens {
  using Element = typename C::Output;
  static constexpr bool kGathers = false;

  static std::uint64_t words(FluxGemmArgs const& args) {
    return static_cast<std::uint64_t>(ceil_div(args.m, C::kTileM)) * ceil_div(args.n, C::kTileN);
  }

  template <class Team>
  __device__ __forceinline__ static void before(GroupedParams const&, int, Team) {}

  template <class Team>
  __device__ __forceinline__ static void after(GroupedParams const& p, int tile, int column,
                                               Team team) {
    team.sync();
    for (int i = team.thread(); i < C::kTileM; i += team.threads()) {
      const int row = tile * C::kTileM + i;
      if (p.groups.rows[row] < 0) continue;
      const int sum = p.groups.tokens[row] / C::kTileM;
      __threadfence();
      atomicAdd(p.finished + sum * p.columns + column, 1u);
    }
  }

  // The count is this item's alone: it is zero again when the kernel ends.
  template <class Team>
  __device__ __forceinline__ static void await_products(GroupedParams const& p, int number,
                                                        Team team) {
    if (team.thread() == 0) {
      std::uint32_t* count = p.finished + number;
      const auto all = static_cast<std::uint32_t>(p.groups.counts[number / p.columns]);
      while (load_acquire_gpu(count) != all) __nanosleep(32);
      *count = 0;
    }
    team.sync();
  }

  template <class Team>
  __device__ __forceinline__ static void item(GroupedParams const& p, int number, Team team) {
    const int tile = number / p.columns, column = number % p.columns;
    const ScatterTargets& to = p.targets;
    await_products(p, number, team);
    const Range owners = owners_of_tile(to.tiling, tile);
    bool reached = true;
    if (to.entries != nullptr) {
      const FluxSync sync = entry_sync(to.sync);
      for (int owner = owners.begin; owner < owners.end; ++owner) {
        reached &=
            await(to.entries, owner, told_by_one(sync, team.thread()), FLUX_WAIT_ENTRY, tile);
      }
    }
    std::uint64_t began = stamp();
    if (reached) sum_tile(p, tile, column, team);
    if (team.thread() == 0) tell(to.sync, began, {FLUX_TRACE_TOKENS, tile, column, 0});
    began = stamp();
    __threadfence_system();
    if (!team.all(reached)) return;
    const int owner = owners.begin + team.thread();
    if (owner < owners.end && to.flags[owner] != nullptr) {
      const int flag = flag_index(to.tiling, to.rank, owner, tile, column);
      store_release_sys(to.flags[owner] + flag, to.sync.epoch);
    }
    if (team.thread() == 0) tell(to.sync, began, {FLUX_TRACE_RELEASE, tile, column, 0});
  }

 private:
  static constexpr int kWidth = kResultVector<C>;
  // Of a thread, whose loads are under way together. sm_80 has no registers for more.
  static constexpr int kVectors = C::kSchedule == Schedule::kMultistage ? 2 : 4, kChoices = 2;
  using Vector = cutlass::AlignedArray<Element, kWidth>;

  // Of each vector: its token, -1 behind the last one, and its column. A thread has every `step`-th.
  struct Places {
    int token[kVectors], column[kVectors];
    __device__ Places(int begin, int rows, int first_column, int in_row, int at, int step) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i, at += step) {
        const int row = at / in_row;
        token[i] = row < rows ? begin + row : -1;
        column[i] = first_column + at % in_row * kWidth;
      }
    }
  };

  template <class Team>
  __device__ __forceinline__ static void sum_tile(GroupedParams const& p, int tile, int column,
                                                  Team team) {
    const ScatterTiling& s = p.targets.tiling;
    const int first = column * C::kTileN, begin = tile * C::kTileM;
    const int in_row = min_of(C::kTileN, p.n - first) / kWidth;
    const int rows = min_of(C::kTileM, s.m - begin), step = team.threads();
    for (int at = team.thread(); at < rows * in_row; at += kVectors * step) {
      sum_vectors(p, Places(begin, rows, first, in_row, at, step));
    }
  }

  __device__ __forceinline__ static void sum_vectors(GroupedParams const& p, Places const& at) {
    cutlass::NumericArrayConverter<float, Element, kWidth> to_float;
    cutlass::Array<float, kWidth> sums[kVectors];
    bool has[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sums[i].clear();
      // Expert parallel: the owner sums no partial of a rank none of whose experts has the token.
      has[i] = p.groups.shares == nullptr && at.token[i] >= 0;
    }
    const int topk = p.groups.topk;
    for (int first = 0; first < topk; first += kChoices) {
      int row[kVectors][kChoices];
      float weight[kVectors][kChoices];
      Vector product[kVectors][kChoices];
      each([&](int i, int j) {
        const std::int64_t pair = std::int64_t{at.token[i]} * topk + first + j;
        const bool exists = at.token[i] >= 0 && first + j < topk;
        row[i][j] = exists ? p.groups.positions[pair] : -1;
        weight[i][j] = exists && p.groups.probs != nullptr ? p.groups.probs[pair] : 1.0f;
      });
      // Past L1, which is not coherent with what other blocks wrote.
      each([&](int i, int j) {
        if (row[i][j] < 0) return;
        const auto* from = static_cast<const Element*>(p.d) + row[i][j] * p.ldd;
        product[i][j] = load_past_l1<Vector>(from + at.column[i]);
      });
      each([&](int i, int j) {
        if (row[i][j] < 0) return;
        has[i] = true;
        const auto addend = to_float(product[i][j]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[i][e] += weight[i][j] * addend[e];
      });
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (has[i]) store(p, at.token[i], at.column[i], sums[i]);
    }
  }

  template <class Each>
  __device__ __forceinline__ static void each(Each with) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kChoices; ++j) with(i, j);
    }
  }

  __device__ __forceinline__ static void store(GroupedParams const& p, int token, int column,
                                               cutlass::Array<float, kWidth> const& sum) {
    const ScatterTiling& s = p.targets.tiling;
    const int owner = owner_of(s.m, s.world, token);
    auto* to = static_cast<Element*>(p.targets.slots[owner]) +
               (token - row_begin(s.m, s.world, owner)) * p.targets.ld + column;
    Vector result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result[e] = Element(sum[e]);
    *reinterpret_cast<Vector*>(to) = result;
  }
};

}  // namespace flux
