/* The C ABI of libflux_nvshmem.so: memory of ranks on other nodes, through NVSHMEM.
 *
 * The library exports one FluxNvshmem under the name FLUX_NVSHMEM_SYMBOL. It is loaded with dlopen
 * (flux/transport/nvshmem_library.py), after libnvshmem_host.so.3, which it needs; a caller
 * from C++ takes the address of the table. Plain C, as abi.h: neither NVSHMEM's nor CUDA's headers.
 *
 * Symmetric memory: what allocate() returns lies at the same place of every rank's heap. An address
 * of it names the same place at every rank, so "at rank r" below takes this rank's own address.
 *
 * Words between nodes have 64 bits, as NVSHMEM has no others, and are written whole; an epoch fills
 * the lower half, the upper is zero. So a stream that waits for 32 bits at the word's address
 * (cuda_host/driver.h) sees the epoch; kernels read the word (await_word of cuda/sync.cuh). Words that are
 * seldom raised age as signals do, and are renewed by the rank whose they are (cuda_host/cuda_op.cpp).
 *
 * Ordering by a word: a reader on the word's device that has seen its value also sees, there, the data
 * that the same call put before it. prepare() refuses devices on which a NIC's writes could overtake
 * one another (cudaDevAttrGPUDirectRDMAWritesOrdering). Peers of that device must not read the data
 * after seeing the word alone: they wait for a signal of their own, raised after a wait for the word.
 *
 * Functions return FLUX_OK, or what abi.h says, or NVSHMEM's status; message() then says more. None
 * of them waits for the host of another rank except those marked (collective), which all ranks call in
 * the same order. NVSHMEM itself has no timeouts, so callers see to it first that all ranks will come.
 */
#ifndef FLUX_CUDA_RUNTIME_NVSHMEM_ABI_H_
#define FLUX_CUDA_RUNTIME_NVSHMEM_ABI_H_

#include "cuda/abi.h"

/* Raised whenever a struct here changes; libraries of another version are refused. */
#define FLUX_NVSHMEM_ABI_VERSION 5
#define FLUX_NVSHMEM_SYMBOL "flux_nvshmem"
#define FLUX_NVSHMEM_ID_BYTES 128

/* Elements of partials and sums. */
enum { FLUX_BF16 = 0, FLUX_F16 = 1 };

/* Beside those of abi.h: the sum of a node. FLUX_STATUS_SIGNAL is its place in FluxNodeSumArgs.words. */
enum { FLUX_WAIT_NODE = 6 };

/* The sending half of GEMM + ReduceScatter between nodes, on the rank that sends its node's sum to
 * some owners on other nodes. The GEMMs of its node bring it their partials of these owners' rows, and
 * raise flags, as if it were the owner. As they rise, it adds up, strip by strip (core/relay.h), and
 * puts each strip to its owner with a signal, while the GEMMs go on with other tiles.
 *
 * Arrays by owner are in the order in which the GEMMs visit the owners' rows. Rows are without gaps. */
typedef struct FluxRelayArgs {
  int32_t dtype;          /* FLUX_BF16 or FLUX_F16 */
  int32_t m, n;           /* of the whole product */
  int32_t world;          /* ranks that own its rows */
  int32_t tile_m, tile_n; /* of the GEMM */
  int32_t blocks;         /* of 256 threads each; the GEMM leaves multiprocessors to them */
  int32_t source_count;
  int32_t sources[FLUX_MAX_WORLD]; /* ranks of this node, in the order in which they are added */
  int32_t owner_count;
  int32_t owners[FLUX_MAX_WORLD]; /* ranks, which are also their numbers in NVSHMEM */
  /* This rank's memory, by owner: partials of the owner's rows, those of sources[i] i * slot_bytes on;
   * and the flags that the sources raise, flag_count of them, numbered by flag_index. */
  const void* slots[FLUX_MAX_WORLD];
  int64_t slot_bytes;
  const uint32_t* flags[FLUX_MAX_WORLD];
  /* Symmetric memory, by owner: where this node's sum is made [own rows of the owner, n], none of the
   * slots (sources may write to them sooner, see relay.cuh); where it goes to at the owner; and the
   * owner's words for it, strip_count of them. */
  void* staging[FLUX_MAX_WORLD];
  void* to[FLUX_MAX_WORLD];
  uint64_t* words[FLUX_MAX_WORLD];
  /* This rank's words, by rank: the epoch of the call that the rank has begun. Nothing is put to an
   * owner before. Null: no wait. */
  const uint64_t* entries;
  FluxSync sync; /* .status: of this rank's pad */
} FluxRelayArgs;

/* The receiving half: the owner's rows, summed over the partials of its own node's ranks and the sums
 * of the other nodes. */
typedef struct FluxNodeSumArgs {
  FluxReduceArgs sum; /* slots: partials and sums, in the order of addition; slot_count of both */
  int32_t dtype;
  int32_t source_count;
  int32_t sources[FLUX_MAX_WORLD]; /* ranks of this node, whose flags in sum.flags are awaited */
  int32_t node_count;
  const uint64_t* words[FLUX_MAX_WORLD]; /* by other node: words that its relay raises */
} FluxNodeSumArgs;

typedef struct FluxNvshmem {
  uint32_t abi_version;    /* FLUX_NVSHMEM_ABI_VERSION */
  uint32_t relay_bytes;    /* sizeof(FluxRelayArgs) as the library was compiled */
  uint32_t node_sum_bytes; /* sizeof(FluxNodeSumArgs) */
  const char* version;     /* of NVSHMEM, as compiled: "3.8.0" */

  /* Of the last function that failed, on any thread. */
  const char* (*message)(void);

  /* FLUX_NVSHMEM_ID_BYTES that one rank makes and all of them pass to init. Needs no GPU; NVSHMEM
   * listens on a socket from then on. */
  int (*unique_id)(void* id);
  /* Whether this rank can take part, before anything collective. Makes `device` current, and loads
   * the kernels: nothing of ours is loaded later, under a kernel that waits. */
  int (*prepare)(int device);
  /* (collective) Ranks are numbered as the caller does, and each has a device of its own. Once per
   * process until finalize(). */
  int (*init)(int rank, int world, const void* id, int device);
  /* (collective) Frees all memory. Behind all work of this rank's streams. */
  int (*finalize)(void);

  /* (collective) Zeroed memory, the same size on all ranks; null where there is not enough. Zeroed
   * here, but peers may not be ready: write to them only after an exchange of one's own. */
  int (*allocate)(uint64_t bytes, void** address);
  /* (collective) Behind all work on any rank that touches it. Waits for puts under way. */
  int (*release)(void* address);
  /* Where this rank reads and writes `address` of rank `pe` by ordinary loads, stores and copies; null
   * where it cannot, as on other nodes. */
  void* (*peer_pointer)(const void* address, int pe);

  /* On `stream`, behind all that was put on it: `bytes` from own memory to `to` at rank `pe`, then
   * `value` to `word` there. A reader that sees the word at `pe` sees the data. What follows on the stream
   * may overwrite `from`, whether or not the data has arrived. Puts to one rank may overtake
   * each other, but no word its own put. May take a multiprocessor while it lasts: a kernel that holds
   * all of them, and waits for what is put, waits in vain. `to` and `word` are symmetric; so should `from` be: NVSHMEM
   * sends other memory only within a node. */
  int (*put_signal)(void* to, const void* from, uint64_t bytes, uint64_t* word, uint64_t value,
                    int pe, void* stream);
  /* `value` to `word` at `pe`, behind all that was put on `stream`. It says nothing about puts that
   * are still under way: those have words of their own. */
  int (*signal)(uint64_t* word, uint64_t value, int pe, void* stream);

  /* Launches the halves of ReduceScatter. Put relay() on a stream of its own, behind this rank's entry
   * of the call and in front of, or beside, its GEMM: it waits for GEMMs of its node, and no GEMM
   * waits for it. node_sum() comes behind the GEMM, as FluxKernel.reduce does, and behind this rank's
   * relay(), which its blocks would keep from a multiprocessor if they were first. A wait that times
   * out is recorded in sync.status; the relay then puts nothing of that strip and raises no word.
   * Not for captured calls (FluxSync.count), whose entries do not hold the epoch: refused. */
  int (*relay)(const FluxRelayArgs* args, void* stream);
  int (*node_sum)(const FluxNodeSumArgs* args, void* stream);
} FluxNvshmem;

#endif
