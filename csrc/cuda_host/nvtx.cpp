#include "cuda_host/nvtx.h"

#include <map>
#include <utility>

#include "cuda_host/shared_library.h"

namespace flux::host {

void load_nvtx(const std::string& library) {
  if (library.empty()) {
    nvtx.store(nullptr, std::memory_order_release);
    return;
  }
  // Under the GIL. Never closed: ranges may be open.
  static std::map<std::string, std::pair<SharedLibrary, Nvtx>> loaded;
  auto entry = loaded.find(library);
  if (entry == loaded.end()) {
    const SharedLibrary opened(library, "the NVTX library " + library);
    Nvtx entries{};
    opened.look_up("nvtxRangePushA", &entries.push);
    opened.look_up("nvtxRangePop", &entries.pop);
    entry = loaded.emplace(library, std::pair(opened, entries)).first;
  }
  nvtx.store(&entry->second.second, std::memory_order_release);
}

void Span::push_call(const char* op, int m) const {
  nvtx_->push((std::string("flux ") + op + " M=" + std::to_string(m)).c_str());
}

}  // namespace flux::host
