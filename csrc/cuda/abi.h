/* The C ABI between flux and its CUDA kernels.
 *
 * A kernel library (flux/kernels builds them, at most four configurations in one) exports one
 * FluxKernel per configuration, under the name that its manifest gives. Libraries are loaded with
 * dlopen by csrc/cuda_host, which needs neither CUDA nor its headers; nothing here depends on PyTorch,
 * so one build serves every version of it.
 *
 * All sizes are in elements unless said otherwise. Pointers are to device-accessible memory, but
 * for those marked (host). Plain C, so that host compilers, nvcc and tests read the same layout.
 */
#ifndef FLUX_CUDA_ABI_H_
#define FLUX_CUDA_ABI_H_

#include <stddef.h>
#include <stdint.h>

/* Raised whenever a struct here changes; libraries of another version are refused. */
#define FLUX_ABI_VERSION 14
/* Ranks whose memory one kernel can address: tensor maps are kernel parameters. */
#define FLUX_MAX_WORLD 32

/* Where each rank's tile goes in visiting order: the fields of flux::TileOrder and CommTiling
 * (csrc/core) that are not extents of the GEMM. */
typedef struct FluxOrder {
  int32_t world;
  int32_t rank;
  int32_t order;     /* flux::Order */
  int32_t direction; /* flux::Direction */
  int32_t swizzle;   /* flux::Swizzle */
  int32_t nodes, domains, lanes;
  int32_t raster;          /* rows of tiles swept together; of clusters, where a kernel has them */
  int32_t comm_tile_rows;  /* rows of a communication tile (AllGather) */
  int32_t column_ranges;   /* > 0: tiles are visited by ranges of columns, world is 1 */
  const int32_t* sequence; /* (host) W chunks in visiting order, or null: by order and mesh. With
                              column ranges: begin and end of each, disjoint, all columns */
} FluxOrder;

/* Events that kernels of a trace build record (flux/trace/gpu.py reads them; cuda/trace.cuh
 * writes). Times are of %globaltimer. */
typedef struct FluxTraceRecord {
  uint64_t begin_ns;
  uint64_t end_ns;
  int32_t kind;   /* FLUX_TRACE_* */
  int32_t row;    /* row of GEMM tiles; of a sum: the first row of [M, n] */
  int32_t column; /* of GEMM tiles; of a wait: FLUX_WAIT_* */
  int32_t signal; /* of a wait: index of the signal, flag or entry; of a sum: rows */
  int32_t sm;     /* multiprocessor */
  int32_t
      unit; /* block * FLUX_TRACE_UNITS + warp group, or -1 - block * 32 - warp: does one thing at a time */
  uint32_t epoch;  /* of the call */
  uint32_t launch; /* FluxSync.launch */
} FluxTraceRecord;
enum {
  FLUX_TRACE_TILE = 1, /* a GEMM tile, from its first multiplication to the end of its epilogue */
  FLUX_TRACE_PART = 2, /* stream-K: a part of a tile that another block finishes */
  FLUX_TRACE_WAIT = 3, /* a wait, if the first check failed */
  FLUX_TRACE_RELEASE = 4, /* stores of a tile awaited, and its flags raised at their owners */
  FLUX_TRACE_SUM = 5,     /* partials added up */
  FLUX_TRACE_PUSH =
      6, /* own rows pushed to all ranks; row: the piece; signal: whether the words were raised */
  FLUX_TRACE_COPY = 7, /* pieces of an AllReduce's result copied out, as for a sum */
  FLUX_TRACE_SEND = 8, /* of experts: rows pushed; row: how many; column: the rank; signal there */
  FLUX_TRACE_TOKENS = 9, /* of experts: products of a tile of tokens added up */
  FLUX_TRACE_UNITS = 8
};
/* In FluxSync.launch of a call of path in_kernel: bits 8 to 30 are the lowest of the host's number of the call,
 * and those below them the number of the weight. FluxTraceRecord.epoch is the kernel's own number there. */
#define FLUX_TRACE_IN_KERNEL 0x80000000u
/* In device memory, allocated before the call. Records beyond the capacity are counted and dropped. */
typedef struct FluxTrace {
  uint32_t count; /* of records, those without room included */
  uint32_t capacity;
  FluxTraceRecord* records;
  uint64_t* begun; /* by unit: when its tile began */
  uint32_t blocks; /* that `begun` has room for */
  uint32_t lost;   /* tiles of other blocks */
} FluxTrace;

/* Waits. Signals hold the epoch of the call that raised them (csrc/core/signal.h). A call that is
 * captured into a graph does not know its number: FluxMeetArgs. */
typedef struct FluxSync {
  uint32_t epoch;
  uint32_t launch;     /* for traces: number of the weight, or the rank whose rows are summed */
  uint64_t timeout_ns; /* a wait that takes longer is recorded in `status` and given up */
  uint64_t* status;    /* FLUX_STATUS_WORDS words of this rank's pad; zero: no wait has failed */
  uint64_t* report; /* the same words in memory of the host, which the kernel that finds a failure
                            also writes, its code last; or null */
  const uint32_t* count; /* entries hold the number that stands here, or (null) the epoch */
  FluxTrace* trace;      /* trace builds: buffer of records, or null; others ignore it */
} FluxSync;

/* Words of FluxSync.status after a failed wait. The first one to fail writes; later waits of the
 * same call see word 0 and do not wait any more. */
enum {
  FLUX_STATUS_CODE = 0,     /* FLUX_WAIT_* */
  FLUX_STATUS_TILE = 1,     /* row of GEMM tiles (AllGather), or tile of the reduction */
  FLUX_STATUS_SIGNAL = 2,   /* index of the signal, flag or entry that was not reached */
  FLUX_STATUS_EXPECTED = 3, /* epoch */
  FLUX_STATUS_OBSERVED = 4,
  FLUX_STATUS_CLAIM = 5, /* taken by the thread of a kernel that writes the others */
  FLUX_STATUS_WORDS = 8
};
enum {
  FLUX_WAIT_NONE = 0,
  FLUX_WAIT_GATHER = 1,  /* rows of x: a signal of the own pad */
  FLUX_WAIT_ENTRY = 2,   /* a peer whose memory is to be written has not begun the call */
  FLUX_WAIT_PARTIAL = 3, /* partials for the own rows: a flag of the own pad */
  FLUX_ABANDONED = 4,    /* nothing of one's own: the peer FLUX_STATUS_SIGNAL has given up */
  FLUX_WAIT_MEET = 5,    /* a peer has not come to where all ranks of a call meet */
  FLUX_WAIT_RESULT = 7,  /* rows of an AllReduce that FLUX_STATUS_SIGNAL sums (6: nvshmem_abi.h) */
  /* No waits: what the router chose has no result (FluxRouteArgs). */
  FLUX_MANY_ROWS = 8, /* FLUX_STATUS_OBSERVED rows, of experts of part FLUX_STATUS_SIGNAL */
  FLUX_BAD_EXPERT = 9 /* token FLUX_STATUS_TILE has expert FLUX_STATUS_SIGNAL */
};

/* AllGather inside the kernel (Knobs.path = in_kernel, cuda/gather.cuh): its blocks push the own rows
 * to all ranks. The number of the call is in device memory, so a replay of a graph is a call as well.
 * Rows lie in one of two buffers: by the parity of the number. */
typedef struct FluxGather {
  const void* rows;                 /* own rows of x, without gaps */
  uint64_t bytes;                   /* of them */
  void* to[FLUX_MAX_WORLD];         /* by rank: where these rows lie there, at even numbers */
  void* everywhere;                 /* NVLink SHARP: all of these at one address, or null */
  int64_t odd;                      /* bytes from there to where they lie at odd ones */
  uint32_t* raised[FLUX_MAX_WORLD]; /* by rank: this rank's word there, set to the number */
  uint32_t*
      counts; /* FLUX_GATHER_WORDS words of this rank, zeroed once; null: rows come otherwise */
  uint32_t first, last; /* 1: this launch is the call's first one, which pushes; its last one */
} FluxGather;
enum {
  FLUX_GATHER_CALLS = 0,   /* calls that have ended, or are about to */
  FLUX_GATHER_NUMBER = 1,  /* of the current call */
  FLUX_GATHER_CLAIMED = 2, /* pieces of the own rows that warps have taken */
  FLUX_GATHER_PUSHED = 3,  /* pieces that all ranks have */
  FLUX_GATHER_WARPS = 4,   /* that have nothing more to push */
  FLUX_GATHER_WORDS = 5
};

/* Sums inside the kernel (cuda/gemm/all_reduce.cuh).
 * AllReduce (Knobs.path = in_kernel): when its tiles are done, its warps sum the own rows, put the sums to
 * all ranks, and copy out what others have put here. The number of the call is in device memory, so a
 * replay of a graph is a call as well.
 * ReduceScatter (Knobs.reduce = in_kernel): warps that do not multiply sum the own rows, strip by strip,
 * when all partials of a strip are there; when its tiles are done, other warps sum what is left. Flags
 * hold the epoch, as those of other calls do. */
typedef struct FluxAllReduce {
  const void* partials[FLUX_MAX_WORLD]; /* own rows, by source: [own rows, n], rows slot_ld apart */
  void* outs[FLUX_MAX_WORLD]; /* by rank: [m, n] without gaps, where others put; own: the result. Or
                                 (ReduceScatter) the own one: [own rows, n] without gaps */
  const void* put;            /* what others have put here */
  /* NVLink SHARP, or null: own rows of all partials at one address, which the switch adds up, instead of
   * `partials`; [m, n] of all ranks, where a store reaches `put` of each. Rows in units of 16 bytes. */
  const void* switch_in;
  void* switch_out;
  uint32_t* sums[FLUX_MAX_WORLD]; /* by rank: a word for each sum (core/all_reduce.h) */
  uint32_t* words;     /* own flags, as FluxGemmArgs.flags of peers, and behind them own sums[] */
  uint32_t word_count; /* of both */
  float scale;         /* of sums */
  uint32_t* counts;  /* FLUX_SUM_WORDS words of this rank, zeroed once; null: a reduction follows */
  uint32_t scatters; /* 1: ReduceScatter. The counts are in the kernel's workspace */
} FluxAllReduce;
enum {
  FLUX_SUM_CALLS = 0,   /* calls that have ended; flags and words of a call hold the next number */
  FLUX_SUM_BLOCKS = 1,  /* of the current launch that have begun */
  FLUX_SUM_CLAIMED = 2, /* pieces that warps have taken */
  FLUX_SUM_WARPS = 3,   /* that have nothing more to do */
  FLUX_SUM_BESIDE = 4,  /* ReduceScatter: strips that warps beside those that multiply look after */
  FLUX_SUM_WORDS = 5
};

/* Of experts: cuda_moe/groups.h. */
typedef struct FluxGroups FluxGroups;
typedef struct FluxRouteArgs FluxRouteArgs;

typedef struct FluxGemmArgs {
  /* d[m, n] = act(alpha * scale_a[m] * scale_b[n] * (a[m, k] b[n, k]^T) + bias[n]), rows of a and
   * d contiguous. b is [n, k], or [k, n] in kernels for transposed weights. Global problem:
   * AllGather: m rows of all ranks, n columns of this one. ReduceScatter: k of this one. */
  int32_t m, n, k;
  float alpha;
  const void* a;
  const void* b;
  void* d; /* AllGather and plain kernels */
  const void* bias;
  const float* scale_a; /* [m], or one value in kernels that scale by tensor */
  const float* scale_b; /* [n], or one value; of experts [experts, n], or one value for each */
  int64_t lda, ldb, ldd;
  FluxOrder order;
  FluxSync sync;
  /* AllGather: signals of this rank's pad, flux::signal_count of them. Null: nothing to wait for. */
  const uint32_t* signals;
  /* AllGather: the own rows of x, without gaps. Tiles of own rows alone read them here, and wait for
   * nothing. Null: own rows are in `a`, under signals, like others. Grouped kernels push them. */
  const void* own;
  /* With counts: `signals` has a word for each rank, which holds the number of the call, and `a` are
   * the rows of calls with an even one. */
  FluxGather gather;
  /* ReduceScatter: by owner, where this rank's partial of the owner's rows goes ([rows, n], rows ld
   * apart), the flags this rank raises there, and the entries of this rank's pad, by owner. With
   * reduce in flight, `slots` is the owner's zeroed result. Null flags: none is raised.
   * AllGather that pushes (FluxGroups): by rank, gathered rows (scales slot_ld bytes behind) and signals.
   * guard_rows: rows in front of every slot, ld apart, that the kernel may fill with anything
   * (core/scatter.h). sm_90a: a kernel whose boxes are higher refuses. */
  void* slots[FLUX_MAX_WORLD];
  int64_t slot_ld;
  int32_t guard_rows;
  int32_t
      waiting; /* dynamic tile schedulers: SMs whose blocks may wait, of sm_count. Blocks beyond leave
                      rather than wait for long (cuda/gemm/tile_counter.cuh). 0: all may */
  uint32_t* flags[FLUX_MAX_WORLD];
  const uint32_t* entries;
  /* With counts: bias is that of the result, and slots and flags need no entries. So is it where it scatters. */
  FluxAllReduce all_reduce;
  const FluxGroups* groups; /* (host) grouped kernels; others ignore it */
  /* Resources. */
  void* workspace; /* workspace_bytes(), zeroed once before the first launch that uses it */
  uint64_t workspace_bytes;
  int32_t sm_count; /* SMs to occupy; 0: all of the device */
  int32_t device;
} FluxGemmArgs;

/* The reduction that follows a scattering GEMM: out[row] = scale * sum over slots + bias. Or a part
 * of it, for the rows of another rank: the sum of one node's partials (docs/kernels/protocol.md). */
typedef struct FluxReduceArgs {
  int32_t rows, n;        /* rows of `rank`, all or some, and their columns */
  int32_t first_row;      /* of the [M, n] matrix */
  int32_t m;              /* M */
  int32_t tile_m, tile_n; /* of the GEMM, whose tiles raise one flag each (core/scatter.h) */
  int32_t world, rank;    /* whose rows they are */
  const void* slots[FLUX_MAX_WORLD]; /* [rows, n] of each source, or the sum of some; ld slot_ld */
  int64_t slot_ld;
  const uint32_t* flags; /* of this rank's pad */
  int32_t by_source;     /* 1: each source raises the word of its number, behind all its rows */
  void* outs[FLUX_MAX_WORLD]; /* one destination, or (AllReduce) one per rank: of first_row; one of
                                 the slots may be a destination as well */
  int32_t out_count;          /* 0: wait for the flags, no more */
  int32_t slot_count;         /* 1 when memory has added up what arrived (reduce in flight) */
  int64_t out_ld;
  /* NVLink SHARP: the same memory of all ranks at one address (its multicast object), where the switch
   * sums values on a load, and stores to all ranks on a store. Own row 0 of the partials, in place of
   * slots, or null; own row 0 of the results, in place of outs, or null. Rows are 16-byte aligned. */
  const void* switch_in;
  void* switch_out;
  const void* bias;
  float scale;
  int32_t sm_count;
  FluxSync sync;
  int32_t first_source, source_count; /* the ranks whose flags are awaited */
  int32_t most_blocks; /* of the launch; 0: as many as leave room for other kernels */
  int32_t early; /* 1: the launch before it on the stream is the GEMM of the same kernel. Blocks may
                    start as soon as all blocks of that have, on multiprocessors that it leaves free */
  const uint32_t* shares; /* by row: FluxGroups.shares, or null */
} FluxReduceArgs;

/* A wait on a stream for what peers have written, where copies of it follow: a kernel of one block, since
 * a stream's own wait orders no writes of other devices. It can also be the barrier of the ranks of a
 * call. In this order it numbers a captured call, resets words of this rank, tells all ranks, and awaits
 * words. A rank that gives up writes that to the status of every peer, since the copies that follow
 * cannot be prevented. */
typedef struct FluxMeetArgs {
  int32_t world, rank;
  uint32_t advance; /* 1: a call begins; 0: it is the same one still */
  int32_t reset_count;
  uint32_t* count; /* of this rank's captured calls; null: its number is the epoch */
  uint32_t* reset; /* words that are set to 0 */
  uint32_t*
      raised[FLUX_MAX_WORLD];   /* by rank: this rank's word there, set to the number; or null */
  const uint32_t* awaited;      /* words of the own pad, which reach the number; null: no wait */
  int32_t first, awaited_count; /* of them */
  int32_t rows, row_step;       /* so many times, this many words apart; 0: once */
  int32_t code;                 /* FLUX_WAIT_*, of a wait that fails */
  uint64_t* statuses[FLUX_MAX_WORLD]; /* by rank; or null */
  FluxSync sync;                      /* its count is not looked at */
} FluxMeetArgs;

/* Copies the rows that the last call of path in_kernel has gathered. */
typedef struct FluxCollectArgs {
  const void* rows; /* of even calls */
  int64_t odd;      /* bytes to those of odd ones */
  const uint32_t* counts;
  void* out; /* like rows, 16-byte aligned */
  uint64_t bytes;
} FluxCollectArgs;

enum {
  FLUX_OK = 0,
  FLUX_REFUSED = -1,  /* the kernel cannot do these arguments; flux.kernels.is_legal agrees */
  FLUX_TOO_SMALL = -2 /* workspace */
  /* positive: a cudaError_t */
};

/* One configuration. */
typedef struct FluxKernel {
  uint32_t abi_version;
  uint32_t args_bytes; /* sizeof(FluxGemmArgs) as the library was compiled */
  const char* name;    /* as in the manifest */
  int32_t tile_m, tile_n;
  uint64_t (*workspace_bytes)(const FluxGemmArgs* args);
  int (*prepare)(int device);                            /* loads the code; before any overlap */
  int (*launch)(const FluxGemmArgs* args, void* stream); /* asynchronous */
  int (*meet)(const FluxMeetArgs* args, void* stream);
  int (*reduce)(const FluxReduceArgs* args, void* stream); /* gemm_rs, else null */
  int (*collect)(const FluxCollectArgs* args, void* stream);
  /* Trace builds, else null: reads %globaltimer `count` times, one right after the other. */
  int (*stamp)(uint64_t* times, int32_t count, void* stream);
  int (*route)(const FluxRouteArgs* args, void* stream); /* grouped kernels, else null */
} FluxKernel;

#endif
