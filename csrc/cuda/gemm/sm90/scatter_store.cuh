// The store of GEMM + ReduceScatter: an epilogue visitor that sends each tile to the owner of its
// rows (Flux paper, 3.1 and Algorithm 1), and then tells the owner.
//
// There is one TMA tensor map per owner: kGuardRows rows in front of the slot, then exactly the rows
// that the owner has (core/scatter.h). A tile's coordinates are made relative to that map. A tile that
// straddles owners is stored once for each of them. TMA leaves out what lies behind the end of a map,
// so rows of the next owner, and ragged tails of M and N, go nowhere. A store must not begin at a
// negative coordinate, and none does: a box is at most kGuardRows high and has a row of the owner, so
// rows of the owner before it land in the guard. The guard is memory in front of each slot that
// no reduction, no copy and no relay has in its range; what it holds, sums of reduce = in_flight
// included, is never read. There is no second path of plain stores.
//
// Ordering, per tile:
//   1. before its first store to an owner the block waits for the owner's entry of this call: by then
//      the owner has finished reading what an earlier call left in the slot. A proxy fence follows.
//      Entries that are there when the block starts, as most are, are seen at once, behind the first
//      loads of the mainloop: each look takes about a microsecond;
//   2. one elected thread issues the bulk stores;
//   3. once kFlagTiles tiles are stored, at the beginning of the next one's epilogue, or when the block
//      ends, the warp waits for their completion (not merely for their shared memory), so the rows are in
//      the owners' memory, and releases the tiles' flags at the owners at system scope. A release takes
//      about a microsecond, in which the tensor cores wait, so it is not made for each tile: the owner
//      adds up behind its own GEMM, which ends no earlier. A tile later nothing is left to wait for. Where
//      warps add up beside the GEMM, a tile of own rows is released when the next one is stored.
//      Flags hold the epoch: never reset.
#pragma once

#include "cuda/gemm/all_reduce.cuh"
#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/sync.cuh"

namespace flux::sm90 {

// Base is CUTLASS's auxiliary store: it converts the fragments and writes them to shared memory.
// CopyOp moves them on: SM90_TMA_STORE, or SM90_TMA_REDUCE_ADD to add them up in flight.
template <class Base, class CopyOp>
struct ScatterStore : Base {
  static constexpr int kFlagTiles = 4;
  using Element = typename Base::ElementAux;
  using Stride = cute::Stride<std::int64_t, cute::_1, cute::_0>;

  using SharedStorage = typename Base::SharedStorage;
  struct Arguments {
    ScatterTargets targets;
    SumTargets sums;
  };
  struct Params : Base::Params {
    using Map = decltype(cute::make_tma_copy(
        CopyOp{},
        cute::make_tensor(static_cast<Element*>(nullptr),
                          cute::repeat_like(Stride{}, std::int32_t(0)), Stride{}),
        typename Base::SmemLayoutTma{}));
    Map maps[FLUX_MAX_WORLD];
    ScatterTargets targets;
    SumTargets sums;
  };

  // TMA wants rows that begin at multiples of 16 bytes.
  template <class Problem>
  static bool can_implement(Problem const&, Arguments const& args) {
    bool aligned = args.targets.ld * sizeof(Element) % 16 == 0;
    for (int owner = 0; owner < args.targets.tiling.world; ++owner) {
      aligned = aligned && reinterpret_cast<std::uintptr_t>(args.targets.slots[owner]) % 16 == 0;
    }
    return aligned && args.targets.tiling.world <= FLUX_MAX_WORLD;
  }
  template <class Problem>
  static std::size_t get_workspace_size(Problem const&, Arguments const&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(Problem const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  // The base's own map only gives the shape of things: coordinates of the whole [M, N]. What it points
  // to is not stored to.
  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    const ScatterTargets& to = args.targets;
    Params params;
    Stride stride{};
    cute::get<0>(stride) = to.ld;
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(
        problem, {static_cast<Element*>(to.slots[to.rank]), stride}, workspace);
    const OwnerMaps maps = owner_maps(to, stride);
    for (int owner = 0; owner < to.tiling.world; ++owner) params.maps[owner] = maps[owner];
    params.targets = to;
    params.sums = args.sums;
    return params;
  }

 private:
  using Map = typename Params::Map;
  using OwnerMaps = std::array<Map, FLUX_MAX_WORLD>;

  // The same for all layers that share an op, so they are encoded once.
  static OwnerMaps owner_maps(const ScatterTargets& to, const Stride& stride) {
    struct Key {
      std::uint64_t slots[FLUX_MAX_WORLD];
      std::int64_t ld, m, n, world;
    };
    static LaunchCache<OwnerMaps, 64, Key> kept;
    const ScatterTiling& s = to.tiling;
    Key key{{}, to.ld, s.m, s.n, s.world};
    for (int owner = 0; owner < s.world; ++owner)
      key.slots[owner] = reinterpret_cast<std::uint64_t>(to.slots[owner]);
    if (const auto known = kept.find(key)) return *known;
    const auto map_of = [&](int owner) {
      auto* base = static_cast<Element*>(to.slots[owner]) - kGuardRows * to.ld;
      const auto shape = cute::make_shape(map_rows(s, owner), s.n, 1);
      return cute::make_tma_copy(CopyOp{},
                                 cute::make_tensor(base, cute::make_layout(shape, stride)),
                                 typename Base::SmemLayoutTma{});
    };
    OwnerMaps maps{};
    for (int owner = 0; owner < s.world; ++owner) maps[owner] = map_of(owner);
    kept.keep(key, maps);
    return maps;
  }

 public:
  CUTLASS_HOST_DEVICE ScatterStore() {}
  // Each block comes here when it starts. Once all have, blocks of the reduction may start beside them.
  CUTLASS_HOST_DEVICE ScatterStore(Params const& params, SharedStorage const& storage)
      : Base(params, storage), params_(&params) {
#if defined(__CUDA_ARCH__)
    let_reduction_start();
    fetch_maps();
    see_entries();
#endif
  }

  // Lives as long as its block works: the flags of the last tile are raised here.
  CUTLASS_HOST_DEVICE ~ScatterStore() {
#if defined(__CUDA_ARCH__)
    raise_flags();
#endif
  }

  template <class BaseCallbacks, class Shift, int kBoxRows>
  struct Callbacks : BaseCallbacks {
    static_assert(kBoxRows <= kGuardRows, "a box may begin before the guard of a slot");

    CUTLASS_DEVICE Callbacks(BaseCallbacks&& base, Shift shift, ScatterStore* store, int tile_m,
                             int tile_n, int thread)
        : BaseCallbacks(static_cast<BaseCallbacks&&>(base)),
          shift_(shift),
          store_(store),
          tile_m_(tile_m),
          tile_n_(tile_n),
          thread_(thread) {}

    CUTLASS_DEVICE void begin() {
      if (thread_ >= 32) return;
      if (store_->stored_ == kFlagTiles || store_->owned_) store_->raise_flags();
      store_->await_entries(tile_m_, thread_);
    }

    CUTLASS_DEVICE void tma_store(int epi_m, int epi_n, int iteration, bool issue) {
      if (!issue || !cute::elect_one_sync()) return;
      const ScatterTiling& s = store_->params_->targets.tiling;
      const int first = tile_m_ * s.tile_m + epi_m * kBoxRows;
      const Range owners = owners_of_rows(s.m, s.world, first, first + kBoxRows);
      auto source = this->bSG_sAux(cute::_, cute::_, cute::_, iteration % kStages);
      auto target = this->bSG_gAux(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int owner = owners.begin; owner < owners.end; ++owner) {
        if (!store_->may_write(owner)) continue;
        auto moved =
            cute::make_tensor(target.data() + shift_(map_row(s, owner, 0)), target.layout());
        cute::copy(store_->params_->maps[owner], source, moved);
      }
    }

    // A cluster may be wider than what is left of N. A tile beyond N stores nothing, and its flag
    // would be that of the next row of tiles.
    CUTLASS_DEVICE void end() {
      const ScatterTargets& to = store_->params_->targets;
      if (thread_ >= 32 || tile_n_ >= flag_columns(to.tiling)) return;
      const Range owners = owners_of_tile(to.tiling, tile_m_);
      const bool own = owners.begin <= to.rank && to.rank < owners.end;
      store_->owned_ = own && store_->params_->sums.to.scatters != 0;
      if (store_->stored_++ != thread_) return;
      store_->pending_m_ = tile_m_;
      store_->pending_n_ = tile_n_;
    }

   private:
    static constexpr int kStages = cute::size<2>(typename Base::SmemLayout{});

    Shift shift_;
    ScatterStore* store_;
    int tile_m_;
    int tile_n_;
    int thread_;
  };

  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    auto base = Base::template get_consumer_store_callbacks<kReferenceSource>(args);
    auto [m, n, k, l] = args.problem_shape_mnkl;
    auto [tile_m, tile_n, tile_k, tile_l] = args.tile_coord_mnkl;
    const auto layout = params_->tma_store_aux.get_tma_tensor(cute::make_shape(m, n, l)).layout();
    // From coordinates in [M, N] to those in the map of an owner, where row 0 of [M, N] is at `rows`.
    // The layout is linear in each mode, so negative distances are as good as positive ones.
    auto shift = [layout](int rows) { return layout(cute::make_coord(rows, 0, 0)); };
    constexpr int kBoxRows = cute::size<0>(decltype(args.epi_tile){});
    return Callbacks<decltype(base), decltype(shift), kBoxRows>(
        static_cast<decltype(base)&&>(base), shift, this, tile_m, tile_n, args.thread_idx);
  }

 private:
  // The warp that stores: a lane for each flag, as all stores of a warp's instruction share a release.
  CUTLASS_DEVICE void raise_flags() {
    if (stored_ == 0) return;
    const ScatterTargets& to = params_->targets;
    const SumTargets& sums = params_->sums;
    const std::uint64_t begin = stamp();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const Range owners = pending_m_ >= 0 ? owners_of_tile(to.tiling, pending_m_) : Range{0, 0};
    const bool counts = sums.to.counts != nullptr && sums.to.scatters == 0;
    const std::uint32_t number = counts ? sum_number(sums.to) : to.sync.epoch;
    const int widest = __reduce_max_sync(~0u, owners.end - owners.begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < stored_ * widest; first += 32) {
      const int tile = (first + lane) / widest;  // the lane that has it
      const int tile_m = __shfl_sync(~0u, pending_m_, tile % 32);
      const int tile_n = __shfl_sync(~0u, pending_n_, tile % 32);
      const int end = __shfl_sync(~0u, owners.end, tile % 32);
      const int owner = __shfl_sync(~0u, owners.begin, tile % 32) + (first + lane) % widest;
      if (tile < stored_ && owner < end && to.flags[owner] != nullptr && may_write(owner)) {
        const int flag = flag_index(to.tiling, to.rank, owner, tile_m, tile_n);
        store_release_sys(to.flags[owner] + flag, number);
      }
    }
    if (pending_m_ >= 0) tell(to.sync, begin, {FLUX_TRACE_RELEASE, pending_m_, pending_n_, 0});
    pending_m_ = -1;
    stored_ = 0;
    owned_ = false;
  }

  // The first store by a map would wait for it.
  CUTLASS_DEVICE void fetch_maps() {
    if (threadIdx.x < params_->targets.tiling.world) {
      cute::prefetch_tma_descriptor(params_->maps[threadIdx.x].get_tma_descriptor());
    }
  }

  // The entries that are there, which then no tile waits for. Where there are none, all owners have entered,
  // unless this rank is to be silent behind a wait that failed.
  CUTLASS_DEVICE void see_entries() {
    const ScatterTargets& to = params_->targets;
    if (to.entries == nullptr) {
      const bool silent = params_->sums.to.counts != nullptr && has_failed(to.sync);
      entered_ = __any_sync(~0u, silent) ? 0 : ~0u;
      return order_stores();
    }
    const int owner = threadIdx.x % 32;
    const bool here = owner < to.tiling.world && epoch_reached(load_acquire_sys(to.entries + owner),
                                                               entry_sync(to.sync).epoch);
    entered_ = __ballot_sync(~0u, here);
    order_stores();
  }

  CUTLASS_DEVICE void await_entries(int tile_m, int lane) {
    const ScatterTargets& to = params_->targets;
    if (to.entries == nullptr) return;
    const Range owners = owners_of_tile(to.tiling, tile_m);
    const int owner = owners.begin + lane;
    const bool news = owner < owners.end && ((entered_ >> owner) & 1u) == 0;
    if (!__any_sync(~0u, news)) return;
    const bool came =
        news && await(to.entries, owner, entry_sync(to.sync), FLUX_WAIT_ENTRY, tile_m);
    entered_ |= __reduce_or_sync(~0u, came ? 1u << owner : 0u);
    order_stores();
  }

  // One lane stores, through the async proxy, behind what the owners did to their slots through the
  // generic one: reads of an earlier call's rows, and zeros that in-flight sums begin with.
  CUTLASS_DEVICE static void order_stores() {
    __syncwarp();
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  // False when the wait for the owner's entry was given up: the owner may still read the slot.
  CUTLASS_DEVICE bool may_write(int owner) const { return ((entered_ >> owner) & 1u) != 0; }

  Params const* params_ = nullptr;
  std::uint32_t entered_ = 0;  // bit of each owner whose entry has been seen
  int stored_ = 0;             // tiles whose flags are not raised yet
  bool owned_ = false;         // warps beside wait for the last one, which has own rows
  int pending_m_ = -1;         // the one of them that this lane raises the flags of
  int pending_n_ = 0;
};

}  // namespace flux::sm90
