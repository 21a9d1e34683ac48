#include "cuda_host/kernels.h"

#include <dlfcn.h>

#include <stdexcept>

namespace flux::host {

namespace {

std::string dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown error";
}

// The loader's message, with the library's own path in place of the path that was opened.
std::string with_path(std::string text, const std::string& file, const std::string& library) {
  const std::size_t at = text.find(file);
  return at == std::string::npos ? text : text.replace(at, file.size(), library);
}

// The library stays for good: unloading waits for all kernels of the device. In a call of one of several
// ranks on a GPU, whose other ranks' kernels wait for that call, it would not end.
std::shared_ptr<void> open(const std::string& library, const std::string& file) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    throw std::runtime_error("cannot open " + library + ": " +
                             with_path(dl_error(), file, library));
  }
  return std::shared_ptr<void>(handle, [](void* h) { dlclose(h); });
}

}  // namespace

Kernel::Kernel(const std::string& library, const std::string& symbol, const std::string& file)
    : library_(open(library, file.empty() ? library : file)) {
  table_ = static_cast<const FluxKernel*>(dlsym(library_.get(), symbol.c_str()));
  if (table_ == nullptr) throw std::runtime_error(library + " has no kernel " + symbol);
  // The version is the first field of the table in all versions of the ABI.
  if (table_->abi_version != FLUX_ABI_VERSION || table_->args_bytes != sizeof(FluxGemmArgs)) {
    throw std::runtime_error(library + " was built for version " +
                             std::to_string(table_->abi_version) + " of the kernel ABI, this is " +
                             std::to_string(FLUX_ABI_VERSION) + ": build it again");
  }
}

void Kernel::check(int status, const char* what) const {
  if (status == FLUX_OK) return;
  const std::string text = name() + ": " + what;
  if (status == FLUX_REFUSED) throw std::invalid_argument(text + " refused: illegal arguments");
  if (status == FLUX_TOO_SMALL) throw std::invalid_argument(text + " refused: workspace too small");
  throw std::runtime_error(text + " failed with CUDA error " + std::to_string(status));
}

void Kernel::prepare(int device) const { check(table_->prepare(device), "loading"); }

std::uint64_t Kernel::workspace_bytes(const FluxGemmArgs& args) const {
  return table_->workspace_bytes(&args);
}

void Kernel::launch(const FluxGemmArgs& args, std::uintptr_t stream) const {
  check(table_->launch(&args, reinterpret_cast<void*>(stream)), "launch");
}

void Kernel::meet(const FluxMeetArgs& args, std::uintptr_t stream) const {
  check(table_->meet(&args, reinterpret_cast<void*>(stream)), "meeting");
}

void Kernel::reduce(const FluxReduceArgs& args, std::uintptr_t stream) const {
  if (!reduces()) throw std::invalid_argument(name() + " has no reduction");
  check(table_->reduce(&args, reinterpret_cast<void*>(stream)), "reduction");
}

void Kernel::collect(const FluxCollectArgs& args, std::uintptr_t stream) const {
  check(table_->collect(&args, reinterpret_cast<void*>(stream)), "collecting");
}

void Kernel::route(const FluxRouteArgs& args, std::uintptr_t stream) const {
  if (!routes()) throw std::invalid_argument(name() + " is of no experts");
  check(table_->route(&args, reinterpret_cast<void*>(stream)), "routing");
}

void Kernel::stamp(std::uint64_t* times, int count, std::uintptr_t stream) const {
  if (!traces()) throw std::invalid_argument(name() + " is of no trace build");
  check(table_->stamp(times, count, reinterpret_cast<void*>(stream)), "stamping");
}

}  // namespace flux::host
