// The emulated NVSHMEM: a part of nvshmem.h, under NVSHMEM's names. Its functions
// are in ptx_machine/nvshmem/nvshmem.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define NVSHMEM_VENDOR_MAJOR_VERSION 0
#define NVSHMEM_VENDOR_MINOR_VERSION 0
#define NVSHMEM_VENDOR_PATCH_VERSION 0

enum { NVSHMEM_SIGNAL_SET = 9 };
enum { NVSHMEM_THREAD_SERIALIZED = 2 };

struct nvshmemi_version_t {
  int major, minor, patch;
};

struct nvshmemx_init_attr_t;

extern "C" {

// Joins the other ranks. Collective.
int nvshmemi_init_thread(int requested, int* provided, unsigned flags,
                         nvshmemx_init_attr_t* attributes, nvshmemi_version_t version);
// Waits for all puts, and for all ranks. Collective.
void nvshmem_finalize();
int nvshmem_my_pe();
int nvshmem_n_pes();

// Memory at the same place of each rank's heap; null if there is not enough. Collective.
void* nvshmem_align(size_t alignment, size_t bytes);
// Waits for all puts, and for all ranks. Collective.
void nvshmem_free(void* memory);
// Where this rank reads and writes `place` of a rank; null where it cannot.
void* nvshmem_ptr(const void* place, int pe);

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch);

}  // extern "C"
