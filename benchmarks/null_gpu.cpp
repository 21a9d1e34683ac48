// A CUDA driver and kernels that do nothing, at once: what is left is what the host does for a call. Calls
// of the driver, launches among them, are listed if somebody asks for it.
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/abi.h"

namespace {

std::uint64_t no_workspace(const FluxGemmArgs*) { return 0; }
int prepare(int) { return FLUX_OK; }
// Of one thread.
bool listing = false;
std::string list;

int counted(const char* name) {
  if (listing) list += std::string(name) + "\n";
  return FLUX_OK;
}
int launch(const FluxGemmArgs*, void*) { return counted("kernel"); }
int meet(const FluxMeetArgs*, void*) { return counted("meet"); }
int reduce(const FluxReduceArgs*, void*) { return counted("reduction"); }
int handle;  // what streams and events point to

}  // namespace

extern "C" {

// Lists the calls from now on, one in a line.
void null_list() {
  listing = true;
  list.clear();
}
const char* null_listed() {
  listing = false;
  return list.c_str();
}

extern const FluxKernel flux_null_ag_gemm = {FLUX_ABI_VERSION,
                                             sizeof(FluxGemmArgs),
                                             "flux_null_ag_gemm",
                                             128,
                                             128,
                                             &no_workspace,
                                             &prepare,
                                             &launch,
                                             &meet,
                                             nullptr,
                                             nullptr};
extern const FluxKernel flux_null_gemm_rs = {FLUX_ABI_VERSION,
                                             sizeof(FluxGemmArgs),
                                             "flux_null_gemm_rs",
                                             128,
                                             128,
                                             &no_workspace,
                                             &prepare,
                                             &launch,
                                             &meet,
                                             &reduce,
                                             nullptr};

int cuGetErrorString(int, const char** text) {
  *text = "no error";
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = &handle;
  return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamQuery(void*) { return 0; }
int cuEventCreate(void** event, unsigned) {
  *event = &handle;
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void*, void*) { return counted("record"); }
int cuEventQuery(void*) { return counted("query"); }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuEventElapsedTime(float* ms, void*, void*) {
  *ms = 0;
  return 0;
}
int cuStreamWaitEvent(void*, void*, unsigned) { return counted("wait"); }
int cuMemcpyAsync(std::uintptr_t, std::uintptr_t, std::size_t, void*) { return counted("copy"); }
int cuMemcpy2DAsync_v2(const void*, void*) { return counted("copy"); }
int cuStreamWriteValue32_v2(void*, std::uintptr_t, std::uint32_t, unsigned) {
  return counted("write");
}
int cuStreamWaitValue32_v2(void*, std::uintptr_t, std::uint32_t, unsigned) {
  return counted("await");
}
int cuStreamBatchMemOp_v2(void*, unsigned count, void*, unsigned) {
  return counted(("memory operations " + std::to_string(count)).c_str());
}
int cuMemsetD32Async(std::uintptr_t, unsigned, std::size_t, void*) { return counted("fill"); }
int cuStreamGetCaptureInfo_v2(void*, int* status, std::uint64_t*, void**, const void**,
                              std::size_t*) {
  *status = 0;
  return 0;
}

}  // extern "C"
