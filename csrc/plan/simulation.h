// Runs the operators of a step in virtual time, on lanes that run one at a time (flux/plan/simulate.py).
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace flux::plan {

// The operators of a step, by number.
struct StepGraph {
  std::vector<std::vector<int>> after;  // those that wait for it
  std::vector<int> deps;                // how many it waits for
  std::vector<int> stage;
  std::vector<bool> communicates;
  int stages = 0;

  // Throws std::invalid_argument for lists that do not fit together.
  void check() const;
  int size() const { return static_cast<int>(after.size()); }
};

struct Times {
  std::vector<double> start, end;
  int ended = 0;  // operators; of a schedule that blocks itself, fewer than all
};

class Simulation {
 public:
  Simulation(const StepGraph& graph, std::vector<double> solo, std::vector<int> lane_of, int lanes);
  virtual ~Simulation() = default;
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Runs until nothing can start.
  Times run();

 protected:
  static constexpr int kNone = -1;

  // The operator that a free lane starts now, which counts as begun; kNone.
  virtual int next_on(int lane) = 0;
  // Its progress alongside others, of what it makes by itself.
  virtual double rate(int number, const std::vector<int>& running) = 0;
  virtual void has_ended(int /*number*/) {}
  virtual void is_ready(int /*number*/) {}

  const StepGraph& graph_;
  std::vector<double> solo_;
  std::vector<int> lane_of_, missing_;

 private:
  void start(const std::vector<int>& lanes, double now);
  void finish(int number, double now, std::vector<int>& lanes);
  void share(const std::vector<int>& running, double now);

  using End = std::tuple<double, int, std::uint32_t>;  // time, operator, version of its rate
  std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;
  std::vector<double> left_, rate_of_, since_;
  std::vector<std::uint32_t> version_;
  std::vector<bool> busy_;
  std::vector<std::vector<int>> running_;  // by stage
  std::vector<int> changed_;               // stages on which operators have started or ended
  Times times_;
};

// The overlap effectiveness of a compute operator and a collective, by number.
using Overlap = std::function<double(int, int)>;

// Lanes run their operators in a given order; compute and communication slow each other down.
class InOrder : public Simulation {
 public:
  // `kinds`: operators of one kind are alike for `overlap`, which is asked once for each two.
  InOrder(const StepGraph& graph, std::vector<double> solo, std::vector<std::vector<int>> lanes,
          std::vector<int> kinds, Overlap overlap);

 private:
  int next_on(int lane) override;
  double rate(int number, const std::vector<int>& running) override;

  std::vector<std::vector<int>> lanes_;
  std::vector<std::size_t> place_;
  std::vector<int> kinds_;
  Overlap overlap_;
  std::unordered_map<std::uint64_t, double> known_;
};

// Lanes run the most urgent operator that is ready; nothing slows another one down. Each stage has
// kResources lanes, of which the first computes, and keeps to its blocks one after the other.
class MostUrgent : public Simulation {
 public:
  static constexpr int kResources = 3;

  // `block`: of compute operators. `left`: how many each block of a stage has.
  MostUrgent(const StepGraph& graph, std::vector<double> solo, std::vector<int> lane_of,
             std::vector<double> priority, std::vector<int> block,
             std::vector<std::vector<int>> left);

  const std::vector<std::vector<int>>& order() const { return order_; }

 private:
  int next_on(int lane) override;
  double rate(int, const std::vector<int>&) override { return 1.0; }
  void has_ended(int number) override;
  void is_ready(int number) override;
  bool computes(int lane) const { return lane % kResources == 0; }

  using Urgent = std::pair<double, int>;
  using Waiting = std::priority_queue<Urgent, std::vector<Urgent>, std::greater<Urgent>>;
  std::vector<double> priority_;
  std::vector<int> block_;
  std::vector<std::vector<int>> left_, order_;
  std::vector<std::size_t> current_;           // block, by stage
  std::vector<std::vector<Waiting>> waiting_;  // by lane, and of compute by block
};

}  // namespace flux::plan
