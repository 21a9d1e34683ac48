// A library that is opened at run time: flux is built without CUDA, NCCL and NVTX.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace flux::host {

class SharedLibrary {
 public:
  // `what` names it in errors. Throws std::runtime_error if it cannot be opened.
  SharedLibrary(const std::string& file, std::string what) : what_(std::move(what)) {
    void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      throw std::runtime_error("cannot open " + what_ + ": " + (why != nullptr ? why : file));
    }
    handle_ = std::shared_ptr<void>(handle, [](void* h) { dlclose(h); });
  }

  // Sets `entry` to the function of this name. Throws std::runtime_error if there is none.
  template <class Function>
  void look_up(const char* name, Function** entry) const {
    *entry = reinterpret_cast<Function*>(dlsym(handle_.get(), name));
    if (*entry == nullptr) throw std::runtime_error(what_ + " has no " + name);
  }

 private:
  std::string what_;
  std::shared_ptr<void> handle_;
};

}  // namespace flux::host
