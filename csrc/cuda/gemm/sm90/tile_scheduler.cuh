// CUTLASS's persistent and stream-K tile schedulers, visiting tiles in Flux's order ("tile coordinate
// swizzling", Flux paper 3.1).
//
// The scheduler of CUTLASS hands out linear slots and turns each into coordinates. Set to go
// row by row, its coordinates are the slot number again; core/tile_map.h says which tile
// that slot is. Clusters move as a whole: a slot is a cluster, and a block keeps its place in it.
//
// Stream-K finds the blocks that share a tile by the coordinates that CUTLASS gave, so those are kept
// in the work tile and put back whenever CUTLASS is asked about it.
#pragma once

#include "cuda/arguments.h"
#include "cuda/sync.cuh"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace flux::sm90 {

template <class Base, class ClusterShape>
class OrderedTileScheduler : public Base {
 public:
  struct Arguments : Base::Arguments {
    TileMap map;
#ifdef FLUX_TRACE
    FluxSync sync{};
#endif
  };
  struct Params : Base::Params {
    TileMap map;
#ifdef FLUX_TRACE
    FluxSync sync;
#endif
  };
  struct WorkTileInfo : Base::WorkTileInfo {
    int slot = 0;  // one register of the main loop; its row and column would be two

    CUTLASS_DEVICE typename Base::WorkTileInfo of_base(TileMap const& map) const {
      typename Base::WorkTileInfo info = *this;
      const auto in_cluster = cute::block_id_in_cluster();
      info.M_idx =
          slot / map.columns * cute::size<0>(ClusterShape{}) + static_cast<int>(in_cluster.x);
      info.N_idx =
          slot % map.columns * cute::size<1>(ClusterShape{}) + static_cast<int>(in_cluster.y);
      return info;
    }
  };

  template <class Problem, class Tile, class... Rest>
  static Params to_underlying_arguments(Problem problem, Tile tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware,
                                        Arguments const& args, Rest... rest) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, tile, cluster, hardware, args, rest...);
    params.map = args.map;
#ifdef FLUX_TRACE
    params.sync = args.sync;
#endif
    return params;
  }

  // Of a launch, into parameters that were made for another one.
  static void set_sync([[maybe_unused]] Params& params, [[maybe_unused]] FluxSync const& sync) {
#ifdef FLUX_TRACE
    params.sync = sync;
#endif
  }

  CUTLASS_DEVICE explicit OrderedTileScheduler(Params const& params)
      : Base(params), map_(&params.map) {}

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return get_current_work(); }

  CUTLASS_DEVICE WorkTileInfo get_current_work() { return ordered(Base::get_current_work()); }

  // As the schedulers of CUTLASS do it: first the rest of this unit, then the next one.
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work) {
    typename Base::WorkTileInfo info = work.of_base(*map_);
    if (Base::continue_current_work(info)) return cute::make_tuple(ordered(info), true);
    Base::advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Pipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&, State) {
    return fetch_next_work(work);
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(Params const& params, WorkTileInfo const& work,
                                   Accumulators& accumulators, std::uint32_t barriers,
                                   std::uint32_t barrier) {
    Base::fixup(params, work.of_base(params.map), accumulators, barriers, barrier);
#ifdef FLUX_TRACE
    // Of stream-K, what another block finishes ends here; the rest with its epilogue.
    if (!Base::compute_epilogue(work.of_base(params.map), params)) {
      end_tile<false>(params.sync, {FLUX_TRACE_PART, work.M_idx, work.N_idx, 0});
    }
#endif
  }

 private:
  CUTLASS_DEVICE WorkTileInfo ordered(typename Base::WorkTileInfo const& info) const {
    WorkTileInfo work;
    static_cast<typename Base::WorkTileInfo&>(work) = info;
    if (!work.is_valid()) return work;
    constexpr int kClusterM = cute::size<0>(ClusterShape{});
    constexpr int kClusterN = cute::size<1>(ClusterShape{});
    const int row = info.M_idx / kClusterM;
    const int column = info.N_idx / kClusterN;
    work.slot = row * map_->columns + column;
    const TileCoord tile = tile_at(*map_, work.slot);
    work.M_idx = tile.m * kClusterM + info.M_idx % kClusterM;
    work.N_idx = tile.n * kClusterN + info.N_idx % kClusterN;
    return work;
  }

  TileMap const* map_;
};

// Tags with which GemmUniversal selects it.
struct OrderedPersistent {};
struct OrderedStreamK {};
template <int kStages>
struct OrderedDynamic {};  // dynamic_scheduler.cuh

// Row by row, so that slots are what the map expects.
template <class C, class Scheduler>
typename Scheduler::Arguments scheduler_arguments(OpKind op, FluxGemmArgs const& given) {
  typename Scheduler::Arguments args{};
#ifdef FLUX_TRACE
  args.sync = given.sync;
#endif
  args.max_swizzle_size = 1;
  args.raster_order = Scheduler::RasterOrderOptions::AlongN;
  args.map = tile_map(tile_order(given, op, C::kTileM * C::kClusterM, C::kTileN * C::kClusterN));
  if constexpr (Scheduler::IsDynamicPersistent) {
    constexpr int kClusterSize = C::kClusterM * C::kClusterN;
    args.claims = tile_claims(op, given, 1, kClusterSize);
    args.tile_rows = C::kTileM * C::kClusterM;
  }
  return args;
}

}  // namespace flux::sm90

namespace cutlass::gemm::kernel::detail {

template <class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<flux::sm90::OrderedPersistent, arch::Sm90, TileShape, ClusterShape,
                             Stages> {
  using Scheduler = flux::sm90::OrderedTileScheduler<PersistentTileSchedulerSm90, ClusterShape>;
};

template <class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<flux::sm90::OrderedStreamK, arch::Sm90, TileShape, ClusterShape,
                             Stages> {
  using Scheduler =
      flux::sm90::OrderedTileScheduler<PersistentTileSchedulerSm90StreamK<TileShape, ClusterShape>,
                                       ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail
