// Memory of a launch that its blocks meet at.
#pragma once

#include <array>

#include "machine.h"

namespace ptx_machine {

// Memory that the blocks of a grid meet at: a size, and the word that cooperative groups count in.
class Workspace {
 public:
  Workspace(Machine& machine, bool needed) : machine_(needed ? &machine : nullptr) {
    if (needed) machine.add_memory(address(), sizeof(words_), "the workspace of a grid");
  }
  ~Workspace() {
    if (machine_ != nullptr) machine_->remove_memory(address());
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(words_.data()); }

 private:
  Machine* machine_;
  alignas(8) std::array<std::uint32_t, 2> words_{};
};

}  // namespace ptx_machine
