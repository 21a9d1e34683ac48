#include "cuda_host/nvtx.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>

namespace flux::host {

void load_nvtx(const std::string& library) {
  if (library.empty()) {
    nvtx.store(nullptr, std::memory_order_release);
    return;
  }
  static std::map<std::string, Nvtx> loaded;  // under the GIL; never unloaded: ranges may be open
  const auto before = loaded.find(library);
  if (before != loaded.end()) {
    nvtx.store(&before->second, std::memory_order_release);
    return;
  }
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error("cannot open the NVTX library: " + std::string(why ? why : library));
  }
  const Nvtx found{reinterpret_cast<decltype(Nvtx::push)>(dlsym(handle, "nvtxRangePushA")),
                   reinterpret_cast<decltype(Nvtx::pop)>(dlsym(handle, "nvtxRangePop"))};
  if (found.push == nullptr || found.pop == nullptr) {
    dlclose(handle);
    throw std::runtime_error(library + " has no nvtxRangePushA and nvtxRangePop");
  }
  nvtx.store(&loaded.emplace(library, found).first->second, std::memory_order_release);
}

void Span::push_call(const char* op, int m) const {
  nvtx_->push((std::string("flux ") + op + " M=" + std::to_string(m)).c_str());
}

}  // namespace flux::host
