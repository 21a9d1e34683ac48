#include "plan/simulation.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace flux::plan {
namespace {

std::vector<int> lanes_of(const std::vector<std::vector<int>>& lanes, int count) {
  std::vector<int> lane_of(count, 0);
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    for (const int number : lanes[lane]) lane_of.at(number) = static_cast<int>(lane);
  }
  return lane_of;
}

void check_sizes(std::size_t count, std::initializer_list<std::size_t> sizes) {
  for (const std::size_t size : sizes) {
    if (size != count) throw std::invalid_argument("lists of operators differ in length");
  }
}

}  // namespace

void StepGraph::check() const {
  check_sizes(after.size(), {deps.size(), stage.size(), communicates.size()});
  for (const int of : stage) {
    if (of < 0 || of >= stages) throw std::invalid_argument("a stage is out of range");
  }
  for (const std::vector<int>& later : after) {
    for (const int number : later) {
      if (number < 0 || number >= size()) throw std::invalid_argument("a number is out of range");
    }
  }
}

Simulation::Simulation(const StepGraph& graph, std::vector<double> solo, std::vector<int> lane_of,
                       int lanes)
    : graph_(graph),
      solo_(std::move(solo)),
      lane_of_(std::move(lane_of)),
      missing_(graph.deps),
      left_(solo_),
      rate_of_(graph.size()),
      since_(graph.size()),
      version_(graph.size()),
      busy_(lanes),
      running_(graph.stages) {
  check_sizes(graph.after.size(), {solo_.size(), lane_of_.size()});
  for (const int lane : lane_of_) {
    if (lane < 0 || lane >= lanes) throw std::invalid_argument("a lane is out of range");
  }
  times_.start.resize(graph.size());
  times_.end.resize(graph.size());
}

Times Simulation::run() {
  double now = 0;
  std::vector<int> free(busy_.size());
  std::iota(free.begin(), free.end(), 0);
  while (true) {
    start(free, now);
    for (const int stage : changed_) share(running_[stage], now);
    changed_.clear();
    if (ends_.empty()) return std::move(times_);
    now = std::get<0>(ends_.top());
    free.clear();
    while (!ends_.empty() && std::get<0>(ends_.top()) == now) {
      const auto [time, number, version] = ends_.top();
      ends_.pop();
      if (version == version_[number]) finish(number, now, free);
    }
  }
}

void Simulation::start(const std::vector<int>& lanes, double now) {
  for (const int lane : lanes) {
    if (busy_[lane]) continue;
    const int number = next_on(lane);
    if (number == kNone) continue;
    busy_[lane] = true;
    times_.start[number] = since_[number] = now;
    running_[graph_.stage[number]].push_back(number);
    changed_.push_back(graph_.stage[number]);
  }
}

void Simulation::finish(int number, double now, std::vector<int>& lanes) {
  const int stage = graph_.stage[number];
  times_.end[number] = now;
  ++times_.ended;
  running_[stage].erase(std::find(running_[stage].begin(), running_[stage].end(), number));
  changed_.push_back(stage);
  busy_[lane_of_[number]] = false;
  lanes.push_back(lane_of_[number]);
  has_ended(number);
  for (const int later : graph_.after[number]) {
    if (--missing_[later] > 0) continue;
    is_ready(later);
    lanes.push_back(lane_of_[later]);
  }
}

// The ends of a stage's running operators, which have changed.
void Simulation::share(const std::vector<int>& running, double now) {
  for (const int number : running) {
    const double progress = running.size() == 1 ? 1.0 : rate(number, running);
    const double before = rate_of_[number];
    if (progress == before) continue;
    left_[number] -= (now - since_[number]) * before;
    since_[number] = now;
    rate_of_[number] = progress;
    ends_.emplace(now + std::max(left_[number], 0.0) / progress, number, ++version_[number]);
  }
}

InOrder::InOrder(const StepGraph& graph, std::vector<double> solo,
                 std::vector<std::vector<int>> lanes, std::vector<int> kinds, Overlap overlap)
    : Simulation(graph, std::move(solo), lanes_of(lanes, graph.size()),
                 static_cast<int>(lanes.size())),
      lanes_(std::move(lanes)),
      place_(lanes_.size()),
      kinds_(std::move(kinds)),
      overlap_(std::move(overlap)) {
  check_sizes(graph.after.size(), {kinds_.size()});
}

int InOrder::next_on(int lane) {
  if (place_[lane] == lanes_[lane].size()) return kNone;
  const int number = lanes_[lane][place_[lane]];
  if (missing_[number] > 0) return kNone;
  ++place_[lane];
  return number;
}

double InOrder::rate(int number, const std::vector<int>& running) {
  const bool communicates = graph_.communicates[number];
  double lost = 0;
  for (const int other : running) {
    if (graph_.communicates[other] == communicates) continue;
    const int comp = communicates ? other : number, comm = communicates ? number : other;
    const std::uint64_t key =
        static_cast<std::uint64_t>(kinds_[comp]) << 32 | static_cast<std::uint32_t>(kinds_[comm]);
    auto found = known_.find(key);
    if (found == known_.end()) found = known_.emplace(key, overlap_(comp, comm)).first;
    lost += 1.0 - found->second;
  }
  return lost > 0 ? 1.0 / (1.0 + lost) : 1.0;
}

MostUrgent::MostUrgent(const StepGraph& graph, std::vector<double> solo, std::vector<int> lane_of,
                       std::vector<double> priority, std::vector<int> block,
                       std::vector<std::vector<int>> left)
    : Simulation(graph, std::move(solo), std::move(lane_of), graph.stages * kResources),
      priority_(std::move(priority)),
      block_(std::move(block)),
      left_(std::move(left)),
      order_(graph.stages * kResources),
      current_(graph.stages),
      waiting_(graph.stages * kResources) {
  check_sizes(graph.after.size(), {priority_.size(), block_.size()});
  if (static_cast<int>(left_.size()) != graph.stages) {
    throw std::invalid_argument("each stage has blocks");
  }
  for (int lane = 0; lane < graph.stages * kResources; ++lane) {
    waiting_[lane].resize(computes(lane) ? left_[lane / kResources].size() : 1);
  }
  for (int number = 0; number < graph.size(); ++number) {
    if (missing_[number] == 0) is_ready(number);
  }
}

void MostUrgent::is_ready(int number) {
  const int lane = lane_of_[number];
  waiting_[lane].at(computes(lane) ? block_[number] : 0).emplace(priority_[number], number);
}

void MostUrgent::has_ended(int number) {
  const int lane = lane_of_[number];
  if (computes(lane)) --left_[lane / kResources].at(block_[number]);
}

int MostUrgent::next_on(int lane) {
  std::size_t block = 0;
  if (computes(lane)) {
    const std::vector<int>& left = left_[lane / kResources];
    std::size_t& current = current_[lane / kResources];
    while (current + 1 < left.size() && left[current] == 0) ++current;
    block = current;
  }
  Waiting& waiting = waiting_[lane][block];
  if (waiting.empty()) return kNone;
  const int number = waiting.top().second;
  waiting.pop();
  order_[lane].push_back(number);
  return number;
}

}  // namespace flux::plan
