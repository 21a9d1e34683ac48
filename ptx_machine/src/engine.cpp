#include "engine.h"

#include <algorithm>

#include "mbarrier.h"
#include "races.h"

namespace ptx_machine {
namespace {

std::string name_of(const Dim& d) {
  std::string text = "(";
  text += std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z);
  return text += ")";
}

}  // namespace

void fail(const Context& c, const Origin& origin, const std::string& why) {
  c.fail(*origin.op, why + ", in an operation that thread " + std::to_string(origin.thread) +
                         " of block " + name_of(origin.block) + " started");
}

std::uint8_t* global(const Context& c, const Origin& origin, std::uint64_t address,
                     std::uint64_t bytes) {
  const std::string problem = outside_global(*c.memory, address, bytes);
  if (!problem.empty()) fail(c, origin, problem);
  return reinterpret_cast<std::uint8_t*>(address);
}

void Engine::start(Context& c, const Op& op, int lane, Transfer transfer) {
  transfer.origin = {&op, c.thread_of(lane), c.warp->block->index};
  transfer.is_read = !transfer.read;
  c.bytes += transfer.reported + transfer.bytes;
  transfer.read_due = transfer.write_due = round_ + kMostRounds;
  if (random_ != nullptr) {
    // Half of the steps are due soon, the others at any time.
    const auto some = [&] {
      const bool soon = (*random_)() % 2 == 0;
      return round_ + (*random_)() % (soon ? 3 : kMostRounds);
    };
    transfer.write_due = some();
    transfer.read_due = std::min(some(), transfer.write_due);
  }
  const Place& counter = transfer.mbarrier;
  if (counter.block != nullptr) count_copies({counter.block, counter.offset}, 1);
  transfers_.push_back(std::make_unique<Transfer>(std::move(transfer)));
}

bool Engine::tick(Context& c) {
  ++round_;
  bool moved = false;
  if (random_ != nullptr) std::shuffle(transfers_.begin(), transfers_.end(), *random_);
  for (std::size_t i = 0; i < transfers_.size();) {
    Transfer& transfer = *transfers_[i];
    if (!transfer.is_read && transfer.read_due <= round_) {
      read(c, transfer);
      moved = true;
    }
    if (transfer.write_due <= round_) {
      write(c, i);
      moved = true;
    } else {
      ++i;
    }
  }
  return moved;
}

bool Engine::advance(Context& c) {
  if (transfers_.empty()) return false;
  const std::size_t number = any();
  Transfer& transfer = *transfers_[number];
  // A store may go on being late between its steps; a load has no reader that could tell.
  if (!transfer.is_read && transfer.owner != nullptr) {
    read(c, transfer);
  } else {
    write(c, number);
  }
  return true;
}

void Engine::complete(Context& c, const Warp& owner, int lane, std::uint64_t before,
                      bool only_reads) {
  if (random_ != nullptr) std::shuffle(transfers_.begin(), transfers_.end(), *random_);
  for (std::size_t i = 0; i < transfers_.size();) {
    Transfer& transfer = *transfers_[i];
    if (transfer.owner != &owner || transfer.lane != lane || transfer.group >= before) {
      ++i;
    } else if (only_reads) {
      if (!transfer.is_read) read(c, transfer);
      ++i;
    } else {
      write(c, i);
    }
  }
}

void Engine::block_ended(Context& c, const Block& block) const {
  for (const auto& transfer : transfers_) {
    const bool reads = transfer->source == &block && !transfer->is_read;
    if (!reads && transfer->target != &block) continue;
    fail(c, transfer->origin,
         "block " + name_of(block.index) + " has ended while its shared memory is still " +
             (reads ? "read" : "written"));
  }
}

void Engine::finish(Context& c) {
  while (!transfers_.empty()) write(c, any());
}

void Engine::read(Context& c, Transfer& transfer) {
  transfer.read(c, transfer.data);
  transfer.is_read = true;
}

void Engine::write(Context& c, std::size_t number) {
  const std::unique_ptr<Transfer> owned = std::move(transfers_[number]);
  Transfer& transfer = *owned;
  transfers_.erase(transfers_.begin() + static_cast<std::ptrdiff_t>(number));
  if (!transfer.is_read) read(c, transfer);
  transfer.write(c, transfer.data);
  if (transfer.mbarrier.block == nullptr) return;
  count_copies({transfer.mbarrier.block, transfer.mbarrier.offset}, -1);
  try {
    complete_bytes(transfer.mbarrier, transfer.reported);
  } catch (const MbarrierError& error) {
    fail(c, transfer.origin, error.what());
  }
}

std::size_t Engine::any() const {
  return random_ == nullptr ? 0 : (*random_)() % transfers_.size();
}

}  // namespace ptx_machine
