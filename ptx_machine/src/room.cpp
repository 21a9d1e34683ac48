#include "room.h"

#include <algorithm>
#include <numeric>

#include "module.h"

namespace ptx_machine {
namespace {

constexpr std::chrono::milliseconds kNap{10};
constexpr std::chrono::seconds kMostOfAnswer{2};

void add(Footprint& used, const Footprint& block) {
  used.threads += block.threads;
  used.registers += block.registers;
  used.shared += block.shared;
}

void take(Footprint& used, const Footprint& block) {
  used.threads -= block.threads;
  used.registers -= block.registers;
  used.shared -= block.shared;
}

}  // namespace

void Room::configure(const DeviceModel& model, int multiprocessors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!tenants_.empty()) throw PtxError("a device cannot change while kernels run");
  if (multiprocessors < 1) throw PtxError("a device needs a multiprocessor");
  model_ = &model;
  groups_ = groups_of(model, multiprocessors);
  each_.assign(multiprocessors, {});
}

std::uint64_t Room::capacity(const Multiprocessor& one, const Footprint& block) const {
  return std::min({model_->blocks - one.blocks,
                   (model_->threads - one.used.threads) / block.threads,
                   (model_->registers - one.used.registers) / block.registers,
                   (model_->shared - one.used.shared) / block.shared});
}

int Room::clusters_that_fit(const Footprint& block, std::uint64_t size) const {
  const auto each = static_cast<std::uint64_t>(blocks_that_fit(*model_, block));
  std::uint64_t clusters = 0;
  for (const int count : groups_) clusters += static_cast<std::uint64_t>(count) * each / size;
  return static_cast<int>(clusters);
}

void Room::enter(Tenant& tenant, std::uint64_t clusters) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const std::string why = too_large(*model_, tenant.block); !why.empty()) {
    throw PtxError(tenant.kernel + " cannot run: " + why);
  }
  if (clusters_that_fit(tenant.block, tenant.size) == 0) {
    throw PtxError(tenant.kernel + " cannot run: no group of multiprocessors has room for " +
                   std::to_string(tenant.size) + " blocks of " + describe(tenant.block));
  }
  tenant.waiting = clusters;
  tenants_.push_back(&tenant);
  ++events_;
}

void Room::leave(Tenant& tenant) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int place : tenant.places) give_back(tenant, place);
  tenants_.remove(&tenant);
  events_ += tenant.progress + 1;  // what was seen never becomes less
  changed_.notify_all();
}

std::vector<int> Room::place_in(int first, int count, const Tenant& tenant,
                                std::mt19937_64* random) {
  std::uint64_t room = 0;
  for (int i = first; i < first + count; ++i) room += capacity(each_[i], tenant.block);
  if (room < tenant.size) return {};
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), first);
  if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
  std::vector<int> found;
  while (found.size() < tenant.size) {
    int best = -1;
    for (const int i : order) {
      if (capacity(each_[i], tenant.block) == 0) continue;
      if (best < 0 || each_[i].blocks < each_[best].blocks) best = i;
    }
    each_[best].blocks += 1;
    add(each_[best].used, tenant.block);
    found.push_back(best);
  }
  return found;
}

std::optional<std::vector<int>> Room::place(Tenant& tenant, std::mt19937_64* random) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Tenant* earlier : tenants_) {
    if (earlier == &tenant) break;
    if (earlier->waiting != 0) return std::nullopt;
  }
  // One block may go anywhere; a cluster into the group with the fewest blocks.
  std::vector<std::pair<std::uint64_t, std::pair<int, int>>> groups;  // blocks, (first, count)
  if (tenant.size == 1) {
    groups.push_back({0, {0, multiprocessors()}});
  } else {
    int first = 0;
    for (const int count : groups_) {
      std::uint64_t blocks = 0;
      for (int i = first; i < first + count; ++i) blocks += each_[i].blocks;
      groups.push_back({blocks, {first, count}});
      first += count;
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  for (const auto& [blocks, range] : groups) {
    std::vector<int> found = place_in(range.first, range.second, tenant, random);
    if (found.empty()) continue;
    tenant.waiting -= 1;
    tenant.places.insert(tenant.places.end(), found.begin(), found.end());
    ++events_;
    if (tenant.waiting == 0) changed_.notify_all();  // it is the turn of the next kernel
    return found;
  }
  return std::nullopt;
}

void Room::give_back(const Tenant& tenant, int multiprocessor) {
  each_[multiprocessor].blocks -= 1;
  take(each_[multiprocessor].used, tenant.block);
}

void Room::release(Tenant& tenant, int multiprocessor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_back(tenant, multiprocessor);
  tenant.places.erase(std::find(tenant.places.begin(), tenant.places.end(), multiprocessor));
  ++events_;
  changed_.notify_all();
}

std::uint64_t Room::running() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t blocks = 0;
  for (const Tenant* tenant : tenants_) blocks += tenant->places.size();
  return blocks;
}

std::string Room::await_none(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [this] { return tenants_.empty(); });
  return tenants_.empty() ? "" : tenants_.front()->kernel;
}

void Room::wait(Tenant& tenant) {
  check(tenant, [] { return std::string(); });
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, kNap);
}

void Room::check(Tenant& tenant, const std::function<std::string()>& standing) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool stands = tenant.waiting != 0 || tenant.is_idle;
  const bool waits = stands && !tenant.has_failed && !is_reporting_;
  if (waits && is_stuck(Clock::now())) {
    tenant.answer = standing();
    report(lock, tenant);
  } else if (tenant.is_asked) {
    tenant.answer = standing();
    tenant.is_asked = false;
    changed_.notify_all();
  }
  if (tenant.has_failed) throw PtxError(tenant.failure);
}

// Whether no kernel has changed anything for as long as patience lasts, which is less where all that run are
// idle.
bool Room::is_stuck(Clock::time_point now) {
  std::uint64_t seen = events_;
  for (const Tenant* tenant : tenants_) seen += tenant->progress;
  if (seen != seen_) {
    seen_ = seen;
    since_ = now;
  }
  const bool idle = std::all_of(tenants_.begin(), tenants_.end(), [](const Tenant* tenant) {
    return tenant->is_idle || tenant->places.empty();
  });
  const bool waits = std::any_of(tenants_.begin(), tenants_.end(),
                                 [](const Tenant* tenant) { return tenant->waiting != 0; });
  const double stood = std::chrono::duration<double>(now - since_).count();
  return (waits && stood > patience) || (idle && idle_patience > 0 && stood > idle_patience);
}

// Ends all kernels, with what each of them waits for. They run in other threads of the host, which tell
// what theirs do, if they come to it.
void Room::report(std::unique_lock<std::mutex>& lock, Tenant& by) {
  is_reporting_ = true;
  for (Tenant* tenant : tenants_) {
    if (tenant == &by) continue;
    tenant->answer.clear();
    tenant->is_asked = !tenant->places.empty();
  }
  changed_.wait_for(lock, kMostOfAnswer, [&] {
    return std::none_of(tenants_.begin(), tenants_.end(),
                        [](const Tenant* tenant) { return tenant->is_asked.load(); });
  });
  is_reporting_ = false;
  if (!is_stuck(Clock::now())) return;  // something has changed in the meantime
  std::string waits, holds, held;
  for (const Tenant* tenant : tenants_) {
    if (tenant->waiting != 0) {
      waits += "\n  " + tenant->kernel + " waits for room for " +
               std::to_string(tenant->waiting * tenant->size) + " blocks, each of " +
               describe(tenant->block);
    }
    if (!tenant->places.empty()) {
      held += "\n  " + tenant->kernel + tenant->answer;
      holds += "\n  " + tenant->kernel + " has room for " + std::to_string(tenant->places.size()) +
               " blocks, each of " + describe(tenant->block) + tenant->answer;
    }
  }
  const std::string text =
      waits.empty() ? "deadlock: every thread waits, or polls what nothing changes" + held
                    : "deadlock: blocks wait for room on " + std::to_string(multiprocessors()) +
                          " multiprocessors of " + model_->name +
                          ", and what runs changes nothing" + waits + holds;
  for (Tenant* tenant : tenants_) {
    tenant->failure = text;
    tenant->has_failed = true;
  }
  changed_.notify_all();
}

}  // namespace ptx_machine
