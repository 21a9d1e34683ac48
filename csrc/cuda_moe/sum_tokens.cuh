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
  template <class Team>
  __device__ __forceinline__ static void sum_tile(GroupedParams const& p, int tile, int column,
                                                  Team team) {
    constexpr int kWidth = kResultVector<C>;
    const ScatterTiling& s = p.targets.tiling;
    const int first = column * C::kTileN;
    const int vectors = min_of(C::kTileN, p.n - first) / kWidth;
    const int begin = tile * C::kTileM;
    const int rows = min_of(C::kTileM, s.m - begin);
    for (int at = team.thread(); at < rows * vectors; at += team.threads()) {
      const int token = begin + at / vectors;
      if (!has_share(p, token)) continue;
      const int owner = owner_of(s.m, s.world, token);
      const int to_column = first + at % vectors * kWidth;
      auto* to = static_cast<Element*>(p.targets.slots[owner]) +
                 (token - row_begin(s.m, s.world, owner)) * p.targets.ld + to_column;
      *reinterpret_cast<cutlass::AlignedArray<Element, kWidth>*>(to) =
          sum_of_choices<kWidth>(p, token, to_column);
    }
  }

  // Expert parallel: whether an expert of this rank has the token. The owner sums no other rank's partial.
  __device__ __forceinline__ static bool has_share(GroupedParams const& p, int token) {
    if (p.groups.shares == nullptr) return true;
    const int* positions = p.groups.positions + std::int64_t{token} * p.groups.topk;
    for (int choice = 0; choice < p.groups.topk; ++choice) {
      if (positions[choice] >= 0) return true;
    }
    return false;
  }

  template <int kWidth>
  __device__ __forceinline__ static cutlass::AlignedArray<Element, kWidth> sum_of_choices(
      GroupedParams const& p, int token, int column) {
    using Vector = cutlass::AlignedArray<Element, kWidth>;
    cutlass::NumericArrayConverter<float, Element, kWidth> to_float;
    cutlass::Array<float, kWidth> sum;
    sum.clear();
    for (int choice = 0; choice < p.groups.topk; ++choice) {
      const std::int64_t pair = std::int64_t{token} * p.groups.topk + choice;
      const int row = p.groups.positions[pair];
      if (row < 0) continue;
      const float weight = p.groups.probs == nullptr ? 1.0f : p.groups.probs[pair];
      // Past L1, which is not coherent with what other blocks wrote.
      const Vector product =
          load_past_l1<Vector>(static_cast<const Element*>(p.d) + row * p.ldd + column);
      const auto addend = to_float(product);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += weight * addend[e];
    }
    Vector result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result[e] = Element(sum[e]);
    return result;
  }
};

}  // namespace flux
