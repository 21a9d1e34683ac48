// The emulated NVSHMEM: a part of nvshmemx.h, and of the device API.
#pragma once

#include "nvshmem.h"

enum { NVSHMEMX_INIT_WITH_UNIQUEID = 8 };

struct nvshmemx_uniqueid_t {
  char name[128];
};
#define NVSHMEMX_UNIQUEID_INITIALIZER {{0}}

struct nvshmemx_init_attr_t {
  int rank, world;
  nvshmemx_uniqueid_t id;
};
#define NVSHMEMX_INIT_ATTR_INITIALIZER {-1, 0, NVSHMEMX_UNIQUEID_INITIALIZER}

struct CUstream_st;

extern "C" {

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id);
int nvshmemx_set_attr_uniqueid_args(int rank, int world, const nvshmemx_uniqueid_t* id,
                                    nvshmemx_init_attr_t* attributes);

// On a stream, which may go on when the source has been read. The value follows the data.
void nvshmemx_putmem_signal_on_stream(void* to, const void* from, size_t bytes, uint64_t* word,
                                      uint64_t value, int operation, int pe, CUstream_st* stream);
void nvshmemx_signal_op_on_stream(uint64_t* word, uint64_t value, int operation, int pe,
                                  CUstream_st* stream);

}  // extern "C"

#ifdef __CUDACC__

// The machine performs it (ptx_machine/src/put.cpp).
extern "C" __device__ void emulated_nvshmem_put_signal(void* to, const void* from, size_t bytes,
                                                       uint64_t* word, uint64_t value, int pe);

// NVSHMEM's threads meet in front of the put, and not behind it; then one of them hands it on. All
// puts are made by the NIC, those to ranks that can be addressed too.
__device__ inline void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, size_t bytes,
                                                        uint64_t* word, uint64_t value,
                                                        int operation, int pe) {
  __syncthreads();
  if (operation != NVSHMEM_SIGNAL_SET) __trap();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    emulated_nvshmem_put_signal(to, from, bytes, word, value, pe);
  }
}

#endif
