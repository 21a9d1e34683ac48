// CUTLASS's epilogue without the shared memory of a D that there is none of.
#pragma once

#include "cutlass/cutlass.h"

namespace flux::sm90 {

// Where a visitor stores (scatter_store.cuh), D is void. CUTLASS's epilogue keeps a buffer of the
// size of the visitor's own all the same, and never writes to it: 32 KiB of 227 for tiles of 128 x 64,
// which is most of a stage of the mainloop. This one's storage has the visitor's part alone.
//
// The base wants a reference to its own type, of which it uses `thread`; of `collective` it takes the
// address, no more. So it gets one that is placed such that its `thread` is ours. That the memory in
// front, which belongs to barriers and the like, is left alone is visible in the base: every
// access to smem_C and smem_D is behind `if constexpr` of a C or a D.
template <class Base>
struct SlimEpilogue : Base {
  static_assert(cute::is_void_v<typename Base::ElementC> &&
                cute::is_void_v<typename Base::ElementD>);
  using Whole = typename Base::TensorStorage;
  struct TensorStorage {
    typename Whole::FusionStorage thread;

    CUTLASS_DEVICE operator Whole&() {
      auto* at = reinterpret_cast<Whole*>(this);
      const auto ahead = reinterpret_cast<char*>(&at->thread) - reinterpret_cast<char*>(at);
      return *reinterpret_cast<Whole*>(reinterpret_cast<char*>(this) - ahead);
    }
  };
  struct SharedStorage {
    TensorStorage tensors;
    typename Base::PipelineStorage pipeline;
  };
  using Base::Base;
};

}  // namespace flux::sm90
