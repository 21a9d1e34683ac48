// GEMM + ReduceScatter in one kernel, for sm_80 and newer (Flux paper, 3.1 and Algorithm 1): each
// vector of a tile is stored with the owner of its row; then the flags at the owners are raised.
#pragma once

#include "cuda/gemm/reduce.cuh"
#include "cuda/gemm/sm80/gemm.cuh"

namespace flux::sm80 {

// CUTLASS's auxiliary store, with the destination chosen row by row. Ordering: a block writes to an
// owner after the owner's entry of this call was seen, so the slot is no longer read; every
// thread makes its stores visible to the system before the barrier after which the flags are
// released (cuda/sync.cuh).
template <class Base, class Element>
struct ScatterStore : Base {
  CUTLASS_HOST_DEVICE ScatterStore() {}
  CUTLASS_HOST_DEVICE ScatterStore(typename Base::Params const& params,
                                   typename Base::SharedStorage const& storage)
      : Base(params, storage) {}

  template <class BaseCallbacks>
  struct Callbacks : BaseCallbacks {
    CUTLASS_DEVICE Callbacks(BaseCallbacks&& base, int tile_m, int tile_n)
        : BaseCallbacks(static_cast<BaseCallbacks&&>(base)),
          targets_(&block_params().targets),
          tile_m_(tile_m),
          tile_n_(tile_n) {}

    CUTLASS_DEVICE void begin_epilogue() {
      reached_ = !block_params().silent;
      if (targets_->entries == nullptr) return;
      const Range owners = owners_of_tile(targets_->tiling, tile_m_);
      const FluxSync sync = entry_sync(targets_->sync);
      for (int owner = owners.begin; owner < owners.end; ++owner) {
        reached_ &= await(targets_->entries, owner, told_by_one(sync), FLUX_WAIT_ENTRY, tile_m_);
      }
    }

    CUTLASS_DEVICE void end_step(int step) {
      const ScatterTiling& s = targets_->tiling;
      auto values = cute::filter(this->tC_rAux);
      auto coords = cute::filter(this->tC_cAux(cute::_, cute::_, cute::_, step));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(values); ++i) {
        const int row = cute::get<0>(coords(i));
        const int column = cute::get<1>(coords(i));
        const bool inside = reached_ && row < s.m && column < s.n;
        const int owner = inside ? owner_of(s.m, s.world, row) : 0;
        auto* to = static_cast<Element*>(targets_->slots[owner]) +
                   (row - row_begin(s.m, s.world, owner)) * targets_->ld + column;
        using Vector = typename Base::VecType;
        cutlass::arch::global_store<Vector, sizeof(Vector)>(values(i), to, inside);
      }
    }

    CUTLASS_DEVICE void end_epilogue() {
      const std::uint64_t begin = stamp();
      __threadfence_system();
      if (!__syncthreads_and(reached_)) return;
      const Range owners = owners_of_tile(targets_->tiling, tile_m_);
      const int owner = owners.begin + static_cast<int>(threadIdx.x);
      if (owner < owners.end && targets_->flags[owner] != nullptr) {
        const int flag = flag_index(targets_->tiling, targets_->rank, owner, tile_m_, tile_n_);
        store_release_sys(targets_->flags[owner] + flag, targets_->sync.epoch);
      }
      if (threadIdx.x == 0) {
        tell(targets_->sync, begin, {FLUX_TRACE_RELEASE, tile_m_, tile_n_, 0});
      }
    }

   private:
    ScatterTargets const* targets_;
    int tile_m_;
    int tile_n_;
    bool reached_ = true;  // whether the owners have begun this call; else their slots are not free
  };

  // The base's own destination is null and never written to; it only gives the shape of things.
  template <class Problem>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, Problem problem) {
    auto base = Base::get_callbacks(tile, thread, problem);
    return Callbacks<decltype(base)>(static_cast<decltype(base)&&>(base), tile.m(), tile.n());
  }
};

template <class C>
struct Scattered {
  using Output = typename C::Output;
  using Store = ScatterStore<
      visit::VisitorAuxStore<typename Types<C>::Threads, Output, visit::kRound, visit::RowStride>,
      Output>;
  using Node = visit::Sm80EVT<Store, visit::Scaled::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {visit::Scaled::arguments(args), {}};
  }
};

// Its blocks do not release the reduction early: devices before sm_90 have no programmatic launch.
template <class C>
struct GemmRS
    : Reduced<Launcher<C, Scattered<C>, OpKind::kGemmRS, Moves::kSums>, typename C::Output, false> {
  static int launch(FluxGemmArgs const* args, void* stream) {
    const FluxAllReduce& to = args->all_reduce;
    const bool newer = to.scatters != 0 || to.switch_in != nullptr || to.switch_out != nullptr;
    if (args->order.world > FLUX_MAX_WORLD || newer) return FLUX_REFUSED;
    return GemmRS::Launcher::launch(args, stream);
  }
};

}  // namespace flux::sm80
