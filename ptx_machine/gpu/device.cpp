// See device.h.
#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>

namespace emulated {

namespace {

constexpr int kThreads = 2048, kRegisters = 65536, kBlocks = 32, kShared = 227 << 10;

constexpr std::chrono::milliseconds kAboutToStart{20};

bool holds(const std::vector<Memory>& all, std::uintptr_t address) {
  return std::any_of(all.begin(), all.end(), [=](const Memory& m) {
    return address >= m.base && address < m.base + m.bytes;
  });
}

std::string lines(const std::vector<std::string>& all) {
  std::string text;
  for (const std::string& line : all) text += line + "\n";
  return text;
}

}  // namespace

std::atomic<const Ordering*> ordering{nullptr};

void raise(const Flag& flag) {
  if (const Ordering* const tell = ordering; tell != nullptr) {
    flag->known = std::shared_ptr<void>(tell->knows(), tell->drop);
  }
  flag->is_raised = true;
}

void await(const Flag& flag) {
  for (Naps naps; !flag->is_raised && !device().failed();) naps.next();
  const Ordering* const tell = ordering;
  if (tell != nullptr && flag->is_raised && flag->known) tell->learns(flag->known.get());
}

void dawdle() {
  const int most = device().delay_us.load();
  if (most == 0) return;
  thread_local std::mt19937 random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  // Seldom and long: everybody else gets far ahead meanwhile.
  if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(most));
}

int& current_gpu() {
  thread_local int gpu = 0;
  return gpu;
}

void write(std::uintptr_t to, const void* from, std::size_t bytes) {
  device().write(to, from, bytes);
}

// Never destroyed: threads of streams use it until the process ends.
Device& device() {
  static auto* const one = new Device;
  return *one;
}

// -- the sticky error ------------------------------------------------------------------------------

void Device::fail(const std::string& text) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (!failed_) error_ = text;
  failed_ = true;
}

std::string Device::error() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return error_;
}

void Device::clear_error() {
  const std::lock_guard<std::mutex> hold(mutex_);
  error_.clear();
  starved_.clear();
  failed_ = false;
}

// -- multiprocessors -------------------------------------------------------------------------------

void Device::start(Grid* grid) {
  const std::lock_guard<std::mutex> hold(mutex_);
  active_.push_back(grid);
  grid->unplaced_since_ = Clock::now();
}

bool Device::has_room(const Multiprocessor& sm, const Footprint& block) const {
  return sm.blocks < kBlocks && sm.threads + block.threads <= kThreads &&
         sm.registers + block.threads * block.registers <= kRegisters &&
         sm.shared + block.shared <= kShared;
}

int Device::place(Grid* grid) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (!limits_room) return next_sm_++ % kMultiprocessors;
  for (const Grid* earlier : active_) {
    if (earlier == grid) break;
    if (earlier->gpu_ == grid->gpu_ && !earlier->placed()) return -1;
  }
  Multiprocessor* const sms = sms_[grid->gpu_];
  int best = -1;
  for (int sm = 0; sm < kMultiprocessors; ++sm) {
    if (!has_room(sms[sm], grid->work().footprint)) continue;
    if (best < 0 || sms[sm].blocks < sms[best].blocks) best = sm;
  }
  if (best < 0) return -1;
  const Footprint& block = grid->work().footprint;
  sms[best].blocks += 1;
  sms[best].threads += block.threads;
  sms[best].registers += block.threads * block.registers;
  sms[best].shared += block.shared;
  return best;
}

void Device::leave(Grid* grid, int sm) {
  const std::lock_guard<std::mutex> hold(mutex_);
  Multiprocessor& left = sms_[grid->gpu_][sm];
  if (!limits_room || left.blocks == 0) return;
  const Footprint& block = grid->work().footprint;
  left.blocks -= 1;
  left.threads -= block.threads;
  left.registers -= block.threads * block.registers;
  left.shared -= block.shared;
}

void Device::end(Grid* grid) {
  const std::lock_guard<std::mutex> hold(mutex_);
  active_.erase(std::find(active_.begin(), active_.end(), grid));
}

// Kernels with blocks on multiprocessors, and what they wait for.
std::string Device::holders(const Grid* but) {
  std::string text;
  for (const Grid* grid : active_) {
    if (grid == but || grid->placed_ == grid->over_) continue;
    text += (text.empty() ? "" : "; ") + grid->work().name + " on " +
            std::to_string(grid->placed_ - grid->over_) + " places waits for " + grid->waits_for();
  }
  return text;
}

void Device::note_starving(Grid* grid) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (starved_.empty()) {
    starved_ = grid->work().name + " finds no room for a block; " + holders(grid);
  }
}

std::string Device::starved() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return starved_;
}

bool Device::resident() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return !holders(nullptr).empty();
}

bool Device::load_module(const std::string& what) {
  if (!loads_lazily) return true;
  const auto until = Clock::now() + std::chrono::milliseconds(loading_ms);
  auto idle_since = Clock::now();
  for (Naps naps;;) {
    std::string resident;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      resident = holders(nullptr);
    }
    const auto at = Clock::now();
    if (!resident.empty()) idle_since = at;
    if (kernels == 0 || at - idle_since > kAboutToStart) return true;
    if (at > until && !resident.empty()) {
      fail("loading a module (" + what + ") while " + resident);
      return false;
    }
    naps.next();
  }
}

// -- queues and memory -----------------------------------------------------------------------------

std::uint64_t Queue::enter() {
  const std::lock_guard<std::mutex> hold(mutex_);
  tickets_.push_back(next_);
  return next_++;
}

bool Queue::at_head(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> hold(mutex_);
  return tickets_.front() == ticket;
}

void Queue::leave(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> hold(mutex_);
  tickets_.erase(std::find(tickets_.begin(), tickets_.end(), ticket));
}

void Device::set_queues(int count) {
  const std::lock_guard<std::mutex> hold(mutex_);
  // What is under way leaves its queue later.
  std::move(queues_.begin(), queues_.end(), std::back_inserter(retired_));
  queues_.clear();
  for (int i = 0; i < count; ++i) queues_.push_back(std::make_unique<Queue>());
}

Queue* Device::queue(int stream) {
  const std::lock_guard<std::mutex> hold(mutex_);
  return queues_.empty() ? nullptr : queues_[stream % queues_.size()].get();
}

void Device::add_host_memory(Memory memory) {
  const std::lock_guard<std::mutex> hold(mutex_);
  host_.push_back(memory);
}

void Device::forbid_waits(Memory memory) {
  const std::lock_guard<std::mutex> hold(mutex_);
  peers_.push_back(memory);
}

bool Device::waits_forbidden(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(mutex_);
  return holds(peers_, address);
}

bool Device::first_use(const char* kind, std::uintptr_t address) {
  if (!loads_lazily) return true;
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    const auto peer = std::find_if(peers_.begin(), peers_.end(), [=](const Memory& m) {
      return address >= m.base && address < m.base + m.bytes;
    });
    if (peer == peers_.end() || !used_.emplace(kind, peer->base).second) return true;
  }
  return load_module(std::string("first ") + kind + " on another device");
}

void Device::add_gpu_memory(Memory memory, int gpu) {
  const std::lock_guard<std::mutex> hold(landing_);
  gpu_memory_.emplace_back(memory, gpu);
}

void Device::write(std::uintptr_t to, const void* from, std::size_t bytes) {
  if (late_us > 0) {
    const std::lock_guard<std::mutex> hold(landing_);
    for (const auto& [memory, gpu] : gpu_memory_) {
      if (to < memory.base || to >= memory.base + memory.bytes || gpu == current_gpu()) continue;
      const auto* data = static_cast<const char*>(from);
      const auto due = Clock::now() + std::chrono::microseconds(late_us);
      late_.push_back({gpu, to, std::vector<char>(data, data + bytes), due});
      return;
    }
  }
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
}

void Device::land(int gpu) {
  if (late_us == 0) return;
  const std::lock_guard<std::mutex> hold(landing_);
  for (Late& one : late_) {
    if (one.gpu != gpu) continue;
    std::memcpy(reinterpret_cast<void*>(one.to), one.data.data(), one.data.size());
    one.gpu = -1;
  }
  while (!late_.empty() && late_.front().gpu < 0) late_.pop_front();
}

void Device::land_what_is_due() {
  if (late_us == 0) return;
  const std::lock_guard<std::mutex> hold(landing_);
  const auto at = Clock::now();
  while (!late_.empty() && (late_.front().gpu < 0 || late_.front().due <= at)) {
    const Late& one = late_.front();
    if (one.gpu >= 0) {
      std::memcpy(reinterpret_cast<void*>(one.to), one.data.data(), one.data.size());
    }
    late_.pop_front();
  }
}

bool Device::is_own(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(mutex_);
  return !holds(peers_, address) && !holds(host_, address);
}

// -- the log ---------------------------------------------------------------------------------------

void Device::record(bool on) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (on) calls_.clear(), times_.clear();
  recording_ = on;
}

void Device::log_call(const std::string& name, std::uintptr_t stream, const std::string& details) {
  if (!recording_) return;
  const std::lock_guard<std::mutex> hold(mutex_);
  calls_.push_back(name + "\t" + std::to_string(stream) + "\t" + details);
}

void Device::log_time(const std::string& what, std::uintptr_t stream, Clock::time_point begin,
                      const std::string& details) {
  if (!recording_) return;
  const auto ns = [](Clock::time_point at) {
    return std::to_string(at.time_since_epoch() / std::chrono::nanoseconds(1));
  };
  const std::lock_guard<std::mutex> hold(mutex_);
  times_.push_back(what + "\t" + std::to_string(stream) + "\t" + ns(begin) + "\t" +
                   ns(Clock::now()) + "\t" + details);
}

std::string Device::calls() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return lines(calls_);
}

std::string Device::timeline() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return lines(times_);
}

void Device::reset() {
  clear_error();
  record(false);
  delay_us = copy_us = launch_us = 0;
  copies_refused = launches_refused = limits_room = loads_lazily = false;
  copies_need_room = kernels_first = false;
  peer_atomics = true;
  starving_ms = loading_ms = 5000;
  full_ms = 20000;
  places = kPlaces;
  ordering = nullptr;
  late_us = 0;
  ++generation;
  const char* queues = std::getenv("PTX_MACHINE_QUEUES");
  set_queues(queues != nullptr ? std::atoi(queues) : 0);
  const std::lock_guard<std::mutex> hold(mutex_);
  host_.clear();
  peers_.clear();
  used_.clear();
  const std::lock_guard<std::mutex> still(landing_);
  gpu_memory_.clear();
  late_.clear();
}

// -- blocks ----------------------------------------------------------------------------------------

Grid::Grid(std::shared_ptr<const Work> work, std::uintptr_t stream, int gpu)
    : work_(std::move(work)),
      stream_(stream),
      gpu_(gpu),
      blocks_(new Block[static_cast<std::size_t>(work_->blocks)]) {
  for (int i = 0; i < work_->blocks; ++i) blocks_[i].unit = i;
}

std::string Grid::waits_for() const {
  for (int i = 0; i < placed_; ++i) {
    const char* const name = blocks_[i].name;
    if (name != nullptr) return std::string(name) + " " + std::to_string(blocks_[i].index);
  }
  return "nothing";
}

bool Grid::step() {
  bool moved = false;
  while (!placed() && !device().failed()) {
    const int sm = device().place(this);
    if (sm < 0) break;
    blocks_[placed_].sm = sm;
    ++placed_;
    moved = true;
    unplaced_since_ = Clock::now();
  }
  if (device().failed()) {  // nothing starts any more
    over_ += work_->blocks - placed_;
    placed_ = work_->blocks;
  }
  const auto patience = std::chrono::milliseconds(device().starving_ms);
  if (!placed() && !noted_ && Clock::now() - unplaced_since_ > patience) {
    noted_ = true;
    device().note_starving(this);
  }
  for (int i = 0; i < placed_; ++i) {
    if (blocks_[i].sm >= 0) moved |= step_block(blocks_[i], i);
  }
  return moved;
}

// Goes on with a block until it has to wait, or has done a unit.
bool Grid::step_block(Block& block, int number) {
  if (block.unit >= work_->units) {
    end_block(block);
    return true;
  }
  if (!block.open) {
    block.open = true;
    block.next = 0;
    block.looked = false;
    block.waits.clear();
    block.came.clear();
    work_->open(block.unit, &block.waits);
  }
  while (block.next < block.waits.size()) {
    const Seen seen = look(block, number);
    if (seen == Seen::kNotYet) return false;
    block.came.push_back(seen == Seen::kCame);
    block.name = nullptr;
    block.looked = false;
    ++block.next;
  }
  const auto began = Clock::now();
  work_->close(block.unit, block.came, {number, block.sm});
  device().log_time(work_->name, stream_, began, "tile");
  block.unit += work_->blocks;
  block.open = false;
  return true;
}

Grid::Seen Grid::look(Block& block, int number) {
  const Wait& wait = block.waits[block.next];
  if (!block.looked) {
    block.since = Clock::now();
    block.stamp = now();
  }
  const std::uint32_t seen = load(wait.words + wait.index);
  if (reached(seen, wait.value)) {
    device().land(gpu_);  // it acquires
    if (block.looked) work_->waited(wait, block.stamp, {number, block.sm});
    return Seen::kCame;
  }
  block.looked = true;
  block.index = wait.index;
  block.name = wait.name;
  if (device().failed() || work_->abandoned()) return Seen::kGivenUp;
  if (Clock::now() - block.since <= work_->patience) return Seen::kNotYet;
  work_->late(wait, seen);
  return Seen::kGivenUp;
}

void Grid::end_block(Block& block) {
  const int sm = std::exchange(block.sm, -1);
  if (over_ + 1 == work_->blocks && work_->over) work_->over();
  ++over_;
  device().leave(this, sm);
}

}  // namespace emulated
