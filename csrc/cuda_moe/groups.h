/* What kernels of experts take beside cuda/abi.h, also plain C. */
#ifndef FLUX_CUDA_MOE_GROUPS_H
#define FLUX_CUDA_MOE_GROUPS_H

#include "cuda/abi.h"

/* A grouped GEMM: rows of A times the weights of experts (docs/kernels/protocol.md, "Mixtures of experts"). All maps
 * are in device memory, so whoever knows the routing may make them (csrc/schedule/grouped.h does on
 * the host). A row of the GEMM is one of a tile's tile_m rows. */
struct FluxGroups {
  const int32_t*
      items; /* in the order in which blocks claim them: tile * columns + column, or -1 - i:
                             AllGather: all signals are awaited (0), or push i - 1; ReduceScatter: the
                             i-th tile of sums */
  const int32_t* experts;     /* by tile */
  const int32_t* sources;     /* by row of the GEMM: the row of A */
  const int32_t* rows;        /* by row of the GEMM: the row of d, -1: none */
  const void* const* weights; /* by expert: as FluxGemmArgs.b */
  const void* bias;           /* [experts, n], or null */
  int32_t item_count, experts_count;
  /* ReduceScatter: d has the products, and a token's are summed in the order of its choices. */
  const int32_t* tokens;    /* by row of the GEMM */
  const int32_t* counts;    /* by tile row of the tokens: their routed rows */
  const int32_t* positions; /* [m, topk]: the row of d, -1: none */
  const float* probs;       /* [m, topk], or null: 1 */
  int32_t topk;
  /* Expert parallelism. AllGather: the kernel pushes own rows to the ranks with one of their experts, by push
   * four words: the rank, the signal there, and where its rows begin and end in `pushed`, rows of [m, k].
   * Null: rows come otherwise. */
  const int32_t* pushes;
  const int32_t* pushed;
  /* ReduceScatter: by own row the bits of ranks whose partial is there; others are not stored, nor
   * summed. Null: all are there. */
  const uint32_t* shares;
  const int32_t*
      item_total; /* where maps are made on the device: the items, at most item_count; or null */
};

/* Makes the maps of FluxGroups on the device (cuda_moe/route.cuh), which csrc/schedule/grouped.h makes on the
 * host. How many rows, tiles and items there are is known there alone; the sizes here bound them. */
struct FluxRouteArgs {
  /* [m, topk], dense, the same on all ranks; below 0: none. Null: the maps are there, but for the weights. */
  const void* experts;
  int32_t expert_bytes; /* of one of them: 4 or 8 */
  int32_t m, topk;
  int32_t total; /* experts of all ranks, of which each of `ep` parts of the ranks has a part */
  int32_t ep;
  int32_t max_rows;       /* routed rows that there is room for; more of any part: FLUX_MANY_ROWS */
  int32_t n;              /* columns of the GEMM */
  int32_t tile_m, tile_n; /* of the kernel */
  int32_t ahead;          /* ReduceScatter: items between a sum and the last product it awaits */
  int32_t gathers;        /* 1: AllGather, 0: ReduceScatter */
  int32_t parallel;       /* 1: pushes (AllGather), shares (ReduceScatter) are made as well */
  int32_t* room;          /* 16-byte aligned, for all maps: flux::route_maps (cuda_moe/route.h) */
  /* (host) by expert of this rank: FluxGroups.weights is made of it. Null: another launch makes that. */
  const void* const* weights;
  void* tail;            /* [max_rows, n] without gaps, zeroed behind the routed rows; or null */
  int32_t element_bytes; /* of it */
  FluxOrder order;
  FluxSync sync;
};

#endif
