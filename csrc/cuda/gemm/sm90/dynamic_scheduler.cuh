// A persistent tile scheduler whose clusters claim their tiles (cuda/gemm/tile_counter.cuh), as a policy of
// CUTLASS's warp-specialized kernels, which have a warp for that.
//
//   block 0 of a cluster   scheduler warp  claims -> number, full barrier of every block
//   all blocks             warps           await full barrier | read number | arrive at empty barrier of block 0
//
// The scheduler warp claims once all warps of the cluster have read the number before: a tile ahead of the
// consumers, two with pingpong, whose warp groups take turns. The first tile is claimed before the kernel
// begins, as a block that starts late may find none.
#pragma once

#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/gemm/tile_counter.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace flux::sm90 {

// Numbers of tiles, from block 0 of a cluster to all of its blocks. A stage holds one. The interface is that
// of CUTLASS's PipelineCLCFetchAsync, which the kernels ask for.
template <class ClusterShape, int kStages>
class TilePipeline {
 public:
  static constexpr std::uint32_t Stages = kStages;
  static constexpr int kNone = 0x7fffffff;
  using PipelineState = cutlass::PipelineState<kStages>;
  enum class ThreadCategory { NonParticipant, Producer, Consumer, ProducerConsumer };
  struct Params {
    ThreadCategory role = ThreadCategory::NonParticipant;
    std::uint32_t transaction_bytes = 0;
    std::uint32_t producer_blockid = 0;
    std::uint32_t producer_arv_count = 0;
    std::uint32_t consumer_arv_count = 0;  // threads of a block that read
  };
  struct SharedStorage {
    alignas(8) std::uint64_t full[kStages];
    alignas(8) std::uint64_t empty[kStages];
    int number[kStages];
    int first;
  };

  CUTLASS_DEVICE TilePipeline(SharedStorage& shared, Params const& params) : shared_(&shared) {
    if (threadIdx.x == 0) {
      const std::uint32_t warps = params.consumer_arv_count / cutlass::NumThreadsPerWarp;
      for (int stage = 0; stage < kStages; ++stage) {
        cutlass::arch::ClusterBarrier::init(shared.full + stage, 1);
        cutlass::arch::ClusterBarrier::init(shared.empty + stage, warps * kBlocks);
      }
    }
    cutlass::arch::fence_barrier_init();
  }

  // The scheduler warps of all blocks come here; that of block 0 acts.
  CUTLASS_DEVICE void producer_acquire(PipelineState state) {
    if (is_first_block()) wait(shared_->empty + state.index(), state.phase());
  }
  // A lane for each block. Its release orders the number before the barrier.
  CUTLASS_DEVICE void push(PipelineState state, int number) {
    const std::uint32_t block = cutlass::canonical_lane_idx();
    if (!is_first_block() || block >= kBlocks) return;
    asm volatile(
        "st.shared::cluster.s32 [%0], %1;" ::"r"(there(shared_->number + state.index(), block)),
        "r"(number)
        : "memory");
    arrive(shared_->full + state.index(), block);
  }
  // CUTLASS itself passes on what pingpong's second warp group needs: one more that is no tile.
  CUTLASS_DEVICE void producer_commit(PipelineState state) { push(state, kNone); }
  // Block 0 must not end while others may still arrive at its barriers.
  CUTLASS_DEVICE void producer_tail(PipelineState state) {
    for (int stage = 0; stage < kStages; ++stage) {
      producer_acquire(state);
      ++state;
    }
  }

  CUTLASS_DEVICE int read(PipelineState state) {
    wait(shared_->full + state.index(), state.phase());
    const int number = shared_->number[state.index()];
    __syncwarp();
    if (cutlass::canonical_lane_idx() == 0) arrive(shared_->empty + state.index(), 0);
    return number;
  }

 private:
  static constexpr std::uint32_t kBlocks = cute::size(ClusterShape{});

  CUTLASS_DEVICE static bool is_first_block() { return cute::block_rank_in_cluster() == 0; }

  CUTLASS_DEVICE static std::uint32_t there(void const* here, std::uint32_t block) {
    return cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), block);
  }

  CUTLASS_DEVICE static void arrive(std::uint64_t const* barrier, std::uint32_t block) {
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there(barrier, block))
        : "memory");
  }

  CUTLASS_DEVICE static void wait(std::uint64_t const* barrier, std::uint32_t phase) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
        "@!p bra AGAIN;\n\t}" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
        "r"(phase)
        : "memory");
  }

  SharedStorage* shared_;
};

// The scheduler warp is held back by TilePipeline alone.
struct NoThrottle : cutlass::PipelineEmpty {
  using PipelineEmpty::PipelineEmpty;
  enum class ThreadCategory { NonParticipant, Producer, Consumer, ProducerConsumer };
  struct Params : PipelineEmpty::Params {
    ThreadCategory role = ThreadCategory::NonParticipant;
    std::uint32_t producer_arv_count = 0;
    std::uint32_t consumer_arv_count = 0;
    std::uint32_t dst_blockid = 0;
    int initializing_warp = 0;
  };
};

template <class ClusterShape, int kStages>
class DynamicTileScheduler
    : public OrderedTileScheduler<cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90,
                                  ClusterShape> {
  using Base = OrderedTileScheduler<cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90,
                                    ClusterShape>;

 public:
  static constexpr bool IsDynamicPersistent = true;
  using WorkTileInfo = typename Base::WorkTileInfo;
  using Pipeline = TilePipeline<ClusterShape, kStages>;
  using ThrottlePipeline = NoThrottle;
  using PipelineState = typename Pipeline::PipelineState;
  struct CLCResponse {};

  class SharedStorage {
   public:
    CUTLASS_DEVICE typename Pipeline::SharedStorage& pipeline() { return pipeline_; }
    CUTLASS_DEVICE typename ThrottlePipeline::SharedStorage throttle_pipeline() { return {}; }
    CUTLASS_DEVICE int const* data() const { return &pipeline_.first; }

   private:
    typename Pipeline::SharedStorage pipeline_;
  };

  struct Arguments : Base::Arguments {
    TileClaims claims;
    int tile_rows = 0;  // of a cluster
  };
  struct Params : Base::Params {
    TileClaims claims;
    int tile_rows;
  };

  template <class Problem, class Tile, class... Rest>
  static Params to_underlying_arguments(Problem problem, Tile tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware,
                                        Arguments const& args, Rest... rest) {
    return {Base::to_underlying_arguments(problem, tile, cluster, hardware, args, rest...),
            args.claims, args.tile_rows};
  }

  static void set_sync(Params& params, FluxSync const& sync) {
    Base::set_sync(params, sync);
    params.claims.needs.set_sync(sync);
  }

  // All threads of all blocks come here first.
  CUTLASS_DEVICE static void claim_first(Params const& params, SharedStorage& shared) {
    int* first = &shared.pipeline().first;
    const bool is_first_block = cute::block_rank_in_cluster() == 0;
    if (threadIdx.x == 0 && is_first_block) *first = claim(params);
    if constexpr (cute::size(ClusterShape{}) > 1) {
      cute::cluster_arrive();
      cute::cluster_wait();
      if (threadIdx.x == 0 && !is_first_block) {
        asm volatile("ld.shared::cluster.s32 %0, [%1];"
                     : "=r"(*first)
                     : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(first), 0))
                     : "memory");
      }
    }
    __syncthreads();
  }

  CUTLASS_DEVICE explicit DynamicTileScheduler(Params const& params)
      : Base(params), params_(&params) {}

  CUTLASS_DEVICE void set_data_ptr(int const* first) { first_ = first; }

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return tile(*first_); }

  // The scheduler warp: claims the next tile, and what follows when there are no more.
  CUTLASS_DEVICE PipelineState advance_to_next_work(Pipeline& pipeline, PipelineState state) {
    pipeline.producer_acquire(state);
    int number = 0;
    if (cute::block_rank_in_cluster() == 0 && cutlass::canonical_lane_idx() == 0) {
      number = claim(*params_);
    }
    pipeline.push(state, __shfl_sync(~0u, number, 0));
    ++state;
    return state;
  }

  CUTLASS_DEVICE void store_invalid_response(PipelineState) {}  // Pipeline::producer_commit() does

  using Base::fetch_next_work;
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline& pipeline, PipelineState state) {
    return cute::make_tuple(tile(pipeline.read(state)), true);
  }

 private:
  CUTLASS_DEVICE static int tiles(Params const& params) {
    return params.map.rows * params.map.columns;
  }

  CUTLASS_DEVICE static int claim(Params const& params) {
    const unsigned clusters = gridDim.x * gridDim.y * gridDim.z / cute::size(ClusterShape{});
    const dim3 at = cute::cluster_id_in_grid();
    const unsigned cluster = at.x + at.y * cute::cluster_grid_dims().x;
    return claim_tile(params.claims, tiles(params), clusters, cluster, [&](int number) {
      const int begin = tile_at(params.map, number).m * params.tile_rows;
      return Range{begin, min_of(begin + params.tile_rows, params.claims.needs.tiling.m)};
    });
  }

  CUTLASS_DEVICE WorkTileInfo tile(int number) const {
    WorkTileInfo work;
    if (number >= tiles(*params_)) return work;
    const TileCoord at = tile_at(params_->map, number);
    const auto in_cluster = cute::block_id_in_cluster();
    work.M_idx = at.m * cute::size<0>(ClusterShape{}) + static_cast<int>(in_cluster.x);
    work.N_idx = at.n * cute::size<1>(ClusterShape{}) + static_cast<int>(in_cluster.y);
    work.is_valid_tile = true;
    return work;
  }

  Params const* params_;
  int const* first_ = nullptr;
};

}  // namespace flux::sm90

namespace cutlass::gemm::kernel::detail {

template <int kStages, class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<flux::sm90::OrderedDynamic<kStages>, arch::Sm90, TileShape,
                             ClusterShape, Stages> {
  using Scheduler = flux::sm90::DynamicTileScheduler<ClusterShape, kStages>;
};

}  // namespace cutlass::gemm::kernel::detail
