// libflux_nvshmem.so: NVSHMEM behind the C ABI of nvshmem_abi.h.
//
// It has its own copy of NVSHMEM's device library, whose state lies in this library's constant memory;
// nvshmemi_init_thread, which is linked in with it, fills it in. So kernels that put must be here.
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "cuda/runtime/relay.cuh"

namespace flux {
namespace {

static_assert(sizeof(nvshmemx_uniqueid_t) == FLUX_NVSHMEM_ID_BYTES);
constexpr std::size_t kAlignment = 256;  // bytes

std::mutex guard;
std::string last_message;
bool initialized = false;

// Keeps what message() says. Returns `status`.
__attribute__((format(printf, 2, 3))) int fail(int status, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  const std::lock_guard<std::mutex> lock(guard);
  last_message = text;
  return status;
}

int check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return FLUX_OK;
  return fail(static_cast<int>(status), "%s: %s", what, cudaGetErrorString(status));
}

const char* message() {
  thread_local std::string copy;
  const std::lock_guard<std::mutex> lock(guard);
  copy = last_message;
  return copy.c_str();
}

// -- kernels ---------------------------------------------------------------------------------------

using Bf16 = cutlass::bfloat16_t;
using F16 = cutlass::half_t;
constexpr int kWide = 8;  // elements of 16 bytes

template <template <class, int> class Kernel, class Args>
int launch(int dtype, bool wide, int blocks, Args const& args, void* stream) {
  if (dtype != FLUX_BF16 && dtype != FLUX_F16) {
    return fail(FLUX_REFUSED, "elements of kind %d cannot be added up", dtype);
  }
  if (blocks == 0) return FLUX_OK;
  const auto kernel = dtype == FLUX_BF16
                          ? (wide ? Kernel<Bf16, kWide>::get() : Kernel<Bf16, 1>::get())
                          : (wide ? Kernel<F16, kWide>::get() : Kernel<F16, 1>::get());
  kernel<<<blocks, kReduceThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return check(cudaGetLastError(), "launch of a kernel for the sums of nodes");
}

template <class Element, int Width>
struct Relay {
  static auto get() { return &relay_kernel<Element, Width>; }
};
template <class Element, int Width>
struct NodeSum {
  static auto get() { return &node_sum_kernel<Element, Width>; }
};

bool wide_rows(FluxRelayArgs const& args) {
  bool ok = args.n % kWide == 0 && args.slot_bytes % 16 == 0;
  for (int i = 0; i < args.owner_count; ++i) {
    ok = ok && aligned16(args.slots[i]) && aligned16(args.staging[i]) && aligned16(args.to[i]);
  }
  return ok;
}

int relay(const FluxRelayArgs* args, void* stream) {
  if (args->source_count < 1 || args->source_count > FLUX_MAX_WORLD || args->owner_count < 0 ||
      args->owner_count > FLUX_MAX_WORLD || args->blocks < 1) {
    return fail(FLUX_REFUSED, "a relay of %d sources for %d owners with %d blocks",
                args->source_count, args->owner_count, args->blocks);
  }
  if (args->sync.count != nullptr) return fail(FLUX_REFUSED, "a relay cannot be captured");
  const ScatterTiling s{args->m, args->n, args->world, args->tile_m, args->tile_n};
  int strips = 0;
  for (int i = 0; i < args->owner_count; ++i) strips += strips_of_owner(s, args->owners[i]);
  return launch<Relay>(args->dtype, wide_rows(*args), min_of(strips, args->blocks), *args, stream);
}

int node_sum(const FluxNodeSumArgs* args, void* stream) {
  const FluxReduceArgs& sum = args->sum;
  if (args->source_count < 1 || args->node_count < 0 ||
      args->source_count + args->node_count > FLUX_MAX_WORLD || sum.slot_count > FLUX_MAX_WORLD ||
      sum.out_count > FLUX_MAX_WORLD) {
    return fail(FLUX_REFUSED, "a sum over %d sources and %d nodes for %d destinations",
                args->source_count, args->node_count, sum.out_count);
  }
  const ScatterTiling s{sum.m, sum.n, sum.world, sum.tile_m, sum.tile_n};
  const int units = strips_of_owner(s, sum.rank) * flag_columns(s);
  // As the reduction on one node: eight blocks fill a multiprocessor.
  const int blocks = min_of(units, 8 * max_of(sum.sm_count, 1));
  return launch<NodeSum>(args->dtype, wide<Bf16>(sum), blocks, *args, stream);
}

template <class Element>
int load_all() {
  const int status = load_code(Relay<Element, kWide>::get(), Relay<Element, 1>::get(),
                               NodeSum<Element, kWide>::get(), NodeSum<Element, 1>::get());
  return check(static_cast<cudaError_t>(status), "loading the kernels for sums of nodes");
}

// -- ranks and memory ------------------------------------------------------------------------------

int unique_id(void* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (const int status = nvshmemx_get_uniqueid(&made)) {
    return fail(status, "nvshmemx_get_uniqueid failed with status %d", status);
  }
  std::memcpy(id, &made, sizeof made);
  return FLUX_OK;
}

int prepare(int device) {
  if (const int status = check(cudaSetDevice(device), "cudaSetDevice")) return status;
  int ordering = 0;
  if (const int status =
          check(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device),
                "cudaDeviceGetAttribute(GPUDirectRDMAWritesOrdering)")) {
    return status;
  }
  if (ordering < cudaGPUDirectRDMAWritesOrderingOwner) {
    return fail(FLUX_REFUSED,
                "device %d does not see what a NIC writes in order "
                "(GPUDirectRDMAWritesOrdering is %d, must be at least %d)",
                device, ordering, static_cast<int>(cudaGPUDirectRDMAWritesOrderingOwner));
  }
  const int status = load_all<Bf16>();
  return status != FLUX_OK ? status : load_all<F16>();
}

int init(int rank, int world, const void* id, int device) {
  if (initialized) return fail(FLUX_REFUSED, "NVSHMEM is initialized already");
  if (const int status = check(cudaSetDevice(device), "cudaSetDevice")) return status;
  nvshmemx_uniqueid_t from;
  std::memcpy(&from, id, sizeof from);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const int status = nvshmemx_set_attr_uniqueid_args(rank, world, &from, &attributes)) {
    return fail(status, "nvshmemx_set_attr_uniqueid_args failed with status %d", status);
  }
  // What nvshmemx_init_attr does, which ends the process when it fails.
  const nvshmemi_version_t compiled{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                    NVSHMEM_VENDOR_PATCH_VERSION};
  int provided = 0;
  if (const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided,
                                              NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, compiled)) {
    return fail(status, "NVSHMEM cannot be initialized: status %d; NVSHMEM_DEBUG=INFO says more",
                status);
  }
  // Other code in this process may have initialized it before, with other ranks.
  if (nvshmem_my_pe() != rank || nvshmem_n_pes() != world) {
    const int pe = nvshmem_my_pe(), pes = nvshmem_n_pes();
    nvshmem_finalize();
    return fail(FLUX_REFUSED, "this process is rank %d of %d in NVSHMEM already, not %d of %d", pe,
                pes, rank, world);
  }
  initialized = true;
  return FLUX_OK;
}

int finalize() {
  if (initialized) nvshmem_finalize();
  initialized = false;
  return FLUX_OK;
}

int zero(void* memory, std::uint64_t bytes) {
  // A stream of its own: the default one waits for what other streams wait for.
  cudaStream_t aside;
  if (const int status = check(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), "stream"))
    return status;
  int status = check(cudaMemsetAsync(memory, 0, bytes, aside), "cudaMemsetAsync");
  if (status == FLUX_OK) status = check(cudaStreamSynchronize(aside), "cudaStreamSynchronize");
  const int destroyed = check(cudaStreamDestroy(aside), "cudaStreamDestroy");
  return status != FLUX_OK ? status : destroyed;
}

int allocate(std::uint64_t bytes, void** address) {
  *address = nvshmem_align(kAlignment, bytes);
  if (*address == nullptr) {
    return fail(cudaErrorMemoryAllocation,
                "NVSHMEM has no %llu bytes left; NVSHMEM_SYMMETRIC_SIZE sets what it has",
                static_cast<unsigned long long>(bytes));
  }
  return zero(*address, bytes);
}

int release(void* address) {
  nvshmem_free(address);
  return check(cudaPeekAtLastError(), "nvshmem_free");
}

void* peer_pointer(const void* address, int pe) { return nvshmem_ptr(address, pe); }

int put_signal(void* to, const void* from, std::uint64_t bytes, std::uint64_t* word,
               std::uint64_t value, int pe, void* stream) {
  nvshmemx_putmem_signal_on_stream(to, from, bytes, word, value, NVSHMEM_SIGNAL_SET, pe,
                                   static_cast<cudaStream_t>(stream));
  return check(cudaPeekAtLastError(), "nvshmemx_putmem_signal_on_stream");
}

int signal(std::uint64_t* word, std::uint64_t value, int pe, void* stream) {
  nvshmemx_signal_op_on_stream(word, value, NVSHMEM_SIGNAL_SET, pe,
                               static_cast<cudaStream_t>(stream));
  return check(cudaPeekAtLastError(), "nvshmemx_signal_op_on_stream");
}

}  // namespace
}  // namespace flux

#define FLUX_TEXT(major, minor, patch) #major "." #minor "." #patch
#define FLUX_VERSION(...) FLUX_TEXT(__VA_ARGS__)

// The name is FLUX_NVSHMEM_SYMBOL.
extern "C" __attribute__((visibility("default"))) const FluxNvshmem flux_nvshmem = {
    FLUX_NVSHMEM_ABI_VERSION,
    sizeof(FluxRelayArgs),
    sizeof(FluxNodeSumArgs),
    FLUX_VERSION(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                 NVSHMEM_VENDOR_PATCH_VERSION),
    &flux::message,
    &flux::unique_id,
    &flux::prepare,
    &flux::init,
    &flux::finalize,
    &flux::allocate,
    &flux::release,
    &flux::peer_pointer,
    &flux::put_signal,
    &flux::signal,
    &flux::relay,
    &flux::node_sum,
};
