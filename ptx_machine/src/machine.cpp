// The machine between launches: its memory, modules that it has loaded, what a launch may ask for.
#include "machine.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "execution.h"
#include "races.h"

namespace ptx_machine {

Machine::Machine() : order_(std::make_shared<GlobalOrder>()) {}

void Machine::add_memory(std::uint64_t address, std::uint64_t bytes, std::string name,
                         bool written) {
  add(address, {address + bytes, std::move(name), {}, false});
  if (!written) order_->expect_writes(address, address + bytes);
}

void Machine::add_multicast(std::uint64_t address, std::uint64_t bytes,
                            std::vector<std::uint64_t> members) {
  if (members.empty()) throw PtxError("multicast memory without members");
  add(address, {address + bytes, "multicast memory", std::move(members), false});
}

void Machine::add(std::uint64_t address, Allocation allocation) {
  order_->forget(address, allocation.end);
  order_->forget_writes(address, allocation.end);
  const std::lock_guard<std::mutex> lock(changing_);
  auto changed = changeable();
  // What lay there before has been freed since.
  auto old = changed->lower_bound(address);
  if (old != changed->begin() && std::prev(old)->second.end > address) --old;
  while (old != changed->end() && old->first < allocation.end) old = changed->erase(old);
  (*changed)[address] = std::move(allocation);
  memory_ = std::move(changed);
}

std::shared_ptr<Allocations> Machine::changeable() {
  if (memory_.use_count() != 1) return std::make_shared<Allocations>(*memory_);
  // What read it has given it up, and read before that.
  std::atomic_thread_fence(std::memory_order_acquire);
  return std::const_pointer_cast<Allocations>(memory_);
}

void Machine::remove_memory(std::uint64_t address) {
  order_->forget_writes(address, address + 1);
  const std::lock_guard<std::mutex> lock(changing_);
  constexpr std::size_t kMost = 4096;
  auto changed = changeable();
  const auto found = changed->find(address);
  if (found != changed->end() && !found->second.is_freed) {
    order_->forget(address, found->second.end);
    found->second.is_freed = true;
    freed_.push_back(address);
  }
  if (freed_.size() > kMost) {
    const auto oldest = changed->find(freed_.front());
    if (oldest != changed->end() && oldest->second.is_freed) changed->erase(oldest);
    freed_.pop_front();
  }
  memory_ = std::move(changed);
}

std::shared_ptr<const Allocations> Machine::memory() const {
  const std::lock_guard<std::mutex> lock(changing_);
  return memory_;
}

std::size_t Machine::modules() {
  const std::lock_guard<std::mutex> lock(loading_);
  return loaded_.size();
}

void Machine::reset(const std::shared_ptr<const Module>& module) {
  const std::lock_guard<std::mutex> lock(loading_);
  const auto found = loaded_.find(module.get());
  if (found == loaded_.end()) return;
  for (const Variable& v : module->variables) {
    const auto memory = found->second.variables.find(v.name);
    if (memory == found->second.variables.end()) continue;
    std::fill(memory->second.begin(), memory->second.end(), std::uint8_t{0});
    std::copy(v.value.begin(), v.value.end(), memory->second.begin());
  }
}

Machine::Loaded& Machine::load(const std::shared_ptr<const Module>& module) {
  const auto [found, is_new] = loaded_.try_emplace(module.get());
  Loaded& loaded = found->second;
  if (!is_new) return loaded;
  loaded.module = module;
  for (const Variable& v : module->variables) {
    if (v.space == Space::kShared) continue;
    std::vector<std::uint8_t>& memory = loaded.variables[v.name];
    memory = v.value;
    memory.resize(std::max<std::uint64_t>(v.bytes, 1));
    add_memory(reinterpret_cast<std::uint64_t>(memory.data()), memory.size(), v.name);
  }
  return loaded;
}

const Program& Machine::program(Loaded& loaded, const Kernel& kernel) {
  auto found = loaded.programs.find(kernel.name);
  if (found == loaded.programs.end()) {
    std::map<std::string, std::uint64_t> addresses;
    for (auto& [name, memory] : loaded.variables) {
      addresses[name] = reinterpret_cast<std::uint64_t>(memory.data());
    }
    Program decoded = decode(*loaded.module, kernel, addresses);
    found = loaded.programs.emplace(kernel.name, std::move(decoded)).first;
  }
  return found->second;
}

Dim cluster_of(const Kernel& kernel, const Launch& launch) {
  constexpr std::uint64_t kMost = 16;  // of sm_90, beyond the portable 8
  const auto text = [](const Dim& d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
  };
  const auto refuse = [&](const std::string& why) {
    throw PtxError(kernel.name + " cannot run in clusters: " + why);
  };
  Dim size = launch.cluster.value_or(Dim{});
  if (!kernel.cluster.empty()) {
    const Dim asked{kernel.cluster[0], kernel.cluster[1], kernel.cluster[2]};
    if (!launch.cluster) size = asked;
    if (size.x != asked.x || size.y != asked.y || size.z != asked.z) {
      refuse("it asks for " + text(asked) + " blocks, the launch for " + text(size));
    }
  } else if (kernel.explicit_cluster && !launch.cluster) {
    refuse("it has .explicitcluster, and the launch does not say how large one is");
  }
  if (size.count() == 0 || size.count() > kMost) refuse("one of " + text(size) + " blocks");
  if (kernel.max_cluster > 0 && size.count() > static_cast<std::uint64_t>(kernel.max_cluster)) {
    refuse(text(size) + " are more than its .maxclusterrank of " +
           std::to_string(kernel.max_cluster));
  }
  const Dim& g = launch.grid;
  if (g.x % size.x != 0 || g.y % size.y != 0 || g.z % size.z != 0) {
    refuse("a grid of " + text(g) + " blocks is not divisible by " + text(size));
  }
  return size;
}

Counters Machine::launch(const std::shared_ptr<const Module>& module, const std::string& name,
                         const Launch& launch) {
  const Kernel& kernel = module->kernel(name);
  const auto threads = launch.block.count();
  if (launch.params.size() != kernel.param_bytes) {
    throw PtxError(name + " takes " + std::to_string(kernel.param_bytes) +
                   " bytes of parameters, got " + std::to_string(launch.params.size()));
  }
  if (threads == 0 || threads > 1024 ||
      (kernel.max_threads > 0 && threads > static_cast<std::uint64_t>(kernel.max_threads))) {
    throw PtxError(name + " cannot run with " + std::to_string(threads) + " threads in a block");
  }
  return execute(*this, program(module, name), launch);
}

const Program& Machine::program(const std::shared_ptr<const Module>& module,
                                const std::string& name) {
  const Kernel& kernel = module->kernel(name);
  const std::lock_guard<std::mutex> lock(loading_);
  return program(load(module), kernel);
}

Counters& Counters::operator+=(const Counters& other) {
  statements += other.statements;
  instructions += other.instructions;
  blocks += other.blocks;
  warps.resize(std::max(warps.size(), other.warps.size()));
  for (std::size_t warp = 0; warp < other.warps.size(); ++warp) {
    warps[warp].resize(other.warps[warp].size());
    for (std::size_t i = 0; i < other.warps[warp].size(); ++i) {
      const Tally& more = other.warps[warp][i];
      Tally& all = warps[warp][i];
      all.executed += more.executed;
      all.threads += more.threads;
      all.tries += more.tries;
      all.bytes += more.bytes;
    }
  }
  return *this;
}

void Context::fail(const Op& op, const std::string& why) const {
  throw PtxError(why + ": " + program.module->describe(*program.kernel, *op.statement));
}

void Context::fail(const Op& op, int lane, const std::string& why) const {
  const Dim& b = warp->block->index;
  fail(op, why + ", by thread " + std::to_string(thread_of(lane)) + " of block (" +
               std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + ")");
}

}  // namespace ptx_machine
