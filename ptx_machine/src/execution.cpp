// The execution of a launch: clusters that start and end, turns of warps, divergence; and the operands
// that statements read.
#include "execution.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "engine.h"
#include "order.h"
#include "races.h"
#include "spins.h"
#include "trace.h"
#include "workspace.h"

namespace ptx_machine {
namespace {

// Statements that a group executes before it is the turn of others.
constexpr int kTurn = 256;
// With a seed: one in so many turns begins a stall of the warp, of at most so many rounds.
constexpr int kStallEvery = 64, kLongestStall = 50;
constexpr std::chrono::microseconds kNap{20}, kIdleNap{200};

class Execution {
 public:
  Execution(Machine& machine, const Program& program, const Launch& launch)
      : machine_(machine),
        program_(program),
        launch_(launch),
        context_{nullptr, program, launch, counters_, nullptr, nullptr, 0, false, false, false, {}},
        random_(launch.seed),
        workspace_(machine, program.has_workspace),
        engine_(launch.seed == 0 ? nullptr : &random_),
        races_(machine.order(), program, launch) {
    context_.cluster = cluster_of(*program.kernel, launch);
    context_.explicit_cluster = launch.cluster.has_value() || !program.kernel->cluster.empty();
    context_.engine = &engine_;
    context_.races = &races_;
    context_.random = launch.seed == 0 ? nullptr : &random_;
    const Room& room = machine.room();
    context_.multiprocessors = room.multiprocessors();
    context_.workspace = workspace_.address();
    context_.most_warps = static_cast<int>(room.model().threads / kLanes);
    tenant_.kernel = program.kernel->name;
    tenant_.size = context_.cluster.count();
    tenant_.block = footprint(room.model(), program, launch.block.count(), launch.dynamic_shared);
    const std::uint64_t warps = (launch.block.count() + kLanes - 1) / kLanes;
    counters_.warps.assign(warps, std::vector<Tally>(program.ops.size()));
  }

  Counters run() {
    const Stay stay(machine_.room(), tenant_, launch_.grid.count() / tenant_.size);
    while (tenant_.waiting != 0 || !clusters_.empty()) {
      if (launch_.stop != nullptr && *launch_.stop) throw PtxError("the device has failed");
      while (tenant_.waiting != 0 && start_cluster()) {
      }
      const bool takes_turns = launch_.yield_turn && launch_.yield_turn();
      if (clusters_.empty()) {
        if (takes_turns) {
          machine_.room().check(tenant_, [] { return std::string(); });
        } else {
          machine_.room().wait(tenant_);
        }
        continue;
      }
      if (!round() && !engine_.advance(context_)) deadlock();
      end_clusters();
      if (launch_.release_next && !released_ && context_.releasing == launch_.grid.count()) {
        released_ = true;
        launch_.release_next();
      }
      if (tenant_.waiting != 0 || tenant_.is_idle || tenant_.is_asked || tenant_.has_failed) {
        machine_.room().check(tenant_, [this] { return standing(); });
      }
    }
    engine_.finish(context_);
    counters_.blocks = started_;
    return std::move(counters_);
  }

 private:
  // The time in which a kernel takes room, which its end gives back however it comes.
  class Stay {
   public:
    Stay(Room& room, Tenant& tenant, std::uint64_t clusters) : room_(room), tenant_(tenant) {
      room.enter(tenant, clusters);
    }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;
    ~Stay() { room_.leave(tenant_); }

   private:
    Room& room_;
    Tenant& tenant_;
  };

  static Dim position(std::uint64_t number, const Dim& sizes) {
    return {static_cast<std::uint32_t>(number % sizes.x),
            static_cast<std::uint32_t>(number / sizes.x % sizes.y),
            static_cast<std::uint32_t>(number / sizes.x / sizes.y)};
  }

  // Returns false if there is no room for another cluster.
  bool start_cluster() {
    const auto places = machine_.room().place(tenant_, context_.random);
    if (!places) return false;
    const Dim &g = launch_.grid, &size = context_.cluster;
    auto cluster = std::make_unique<Cluster>();
    cluster->index = position(next_++, {g.x / size.x, g.y / size.y, g.z / size.z});
    const Dim& first = cluster->index;
    for (std::uint32_t rank = 0; rank < size.count(); ++rank) {
      const Dim in = position(rank, size);
      auto block =
          start_block({first.x * size.x + in.x, first.y * size.y + in.y, first.z * size.z + in.z});
      block->cluster = cluster.get();
      block->rank = rank;
      races_.start(*cluster, *block);
      block->multiprocessor = (*places)[rank];
      cluster->blocks.push_back(std::move(block));
    }
    cluster->running = static_cast<std::uint32_t>(size.count());
    cluster->threads = launch_.block.count() * size.count();
    clusters_.push_back(std::move(cluster));
    return true;
  }

  // A block gives its room back when the whole cluster has ended: others may still read its memory.
  void end_clusters() {
    std::erase_if(clusters_, [&](const auto& cluster) {
      if (cluster->running != 0) return false;
      for (const auto& block : cluster->blocks) {
        machine_.room().release(tenant_, block->multiprocessor);
      }
      return true;
    });
  }

  std::unique_ptr<Block> start_block(const Dim& index) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->number = started_++;
    const Kernel& kernel = *program_.kernel;
    const std::uint64_t registers = most_registers(kernel, launch_.block.count());
    block->shared.assign(program_.shared_bytes + launch_.dynamic_shared, 0xCD);
    const auto threads = static_cast<int>(launch_.block.count());
    block->warps.resize((threads + kLanes - 1) / kLanes);
    for (std::size_t i = 0; i < block->warps.size(); ++i) {
      Warp& warp = block->warps[i];
      warp.block = block.get();
      warp.index = static_cast<int>(i);
      const int lanes = std::min(kLanes, threads - warp.index * kLanes);
      warp.alive = lanes == kLanes ? ~Mask{0} : (Mask{1} << lanes) - 1;
      warp.groups.push_back({warp.alive});
      warp.registers.resize(kernel.registers.size());
      warp.written.resize(kernel.registers.size());
      warp.predicates.resize(kernel.predicates.size());
      warp.predicates_written.resize(kernel.predicates.size());
      warp.local.assign(kernel.local_bytes * kLanes, 0xCD);
      warp.max_registers = registers;
      warp.tallies = counters_.warps[i].data();
    }
    block->running = static_cast<std::uint32_t>(block->warps.size());
    if (launch_.events != nullptr) launch_.events->blocks.push_back(index);
    return block;
  }

  // Gives each warp a turn, in an order of this round. Returns whether one of them got anywhere.
  // Where all that do are asleep, what they wait for comes from another thread of the host.
  bool round() {
    memory_ = machine_.memory();
    context_.memory = memory_.get();
    bool moved = !engine_.empty() && engine_.tick(context_), awake = moved;
    std::vector<Warp*> warps;
    each_warp([&](Warp& warp) {
      if (!warp.groups.empty()) warps.push_back(&warp);
    });
    if (launch_.seed != 0) std::shuffle(warps.begin(), warps.end(), random_);
    bool stalled = false;
    for (Warp* warp : warps) {
      if (launch_.seed != 0 && !spins_.on() && stalls(*warp)) {
        stalled = true;
        continue;
      }
      context_.slept = false;
      const bool got_on = turn(*warp);
      moved |= got_on;
      awake |= got_on && !context_.slept;
    }
    watch();
    moved |= std::exchange(context_.outside, false);
    if (!moved && stalled) {  // all that could go on was held back
      for (Warp* warp : warps) warp->stalled = 0;
      return true;
    }
    if (moved && !awake) std::this_thread::sleep_for(kNap);
    return moved;
  }

  // Behind a round: whether threads only wait and poll, for what only others can bring.
  void watch() {
    if (machine_.room().idle_patience == 0) {
      tenant_.progress = acted_;
      return;
    }
    const bool was_on = spins_.on();
    spins_.round(changed_, !engine_.empty(), [this](auto&& f) { each_warp(f); });
    if (spins_.on() && !was_on) races_.forget_values();  // a load that may be late is not
    if (launch_.stops_clock) stop_clock(spins_.on());
    tenant_.is_idle = spins_.idle();
    if (!spins_.idle()) {
      tenant_.progress = acted_;
    } else if (!launch_.yield_turn) {
      std::this_thread::sleep_for(kIdleNap);
    }
  }

  void stop_clock(bool stop) {
    if (stop == (context_.stopped_at != 0)) return;
    const auto host = std::chrono::steady_clock::now().time_since_epoch();
    context_.stopped_at = stop ? host / std::chrono::nanoseconds(1) : 0;
    context_.stopped_statements = counters_.statements;
  }

  // Whether a warp gets no turn: now and then one is held back for long.
  bool stalls(Warp& warp) {
    if (warp.stalled > 0) {
      --warp.stalled;
      return true;
    }
    if (random_() % kStallEvery == 0) warp.stalled = static_cast<int>(random_() % kLongestStall);
    return warp.stalled > 0;
  }

  bool turn(Warp& warp) {
    bool moved = false;
    // Lowest first: threads that have left a branch wait for those inside, which come to them.
    std::sort(warp.groups.begin(), warp.groups.end(),
              [](const Group& a, const Group& b) { return a.pc < b.pc; });
    if (launch_.seed != 0 && warp.groups.size() > 1) {
      std::shuffle(warp.groups.begin(), warp.groups.end(), random_);
    }
    for (std::size_t i = 0; i < warp.groups.size(); ++i) {
      moved |= advance(warp, i);
      merge(warp);
    }
    return moved;
  }

  // Executes one group for a turn, or until it waits or meets another. Returns whether it moved.
  bool advance(Warp& warp, std::size_t number) {
    bool moved = false;
    for (int step = 0; step < kTurn && number < warp.groups.size(); ++step) {
      Group& group = warp.groups[number];
      if (group.pc >= static_cast<int>(program_.ops.size())) {
        exit(warp, group.mask);
        return true;
      }
      const Op& op = program_.ops[group.pc];
      context_.warp = &warp;
      context_.group = &group;
      const bool guarded = op.guard.kind == Value::Kind::kPredicate;
      const Mask mask =
          guarded ? group.mask & read_predicate(context_, op, op.guard, group.mask) : group.mask;
      const int from = group.pc;
      const Outcome outcome = execute(warp, group, op, mask);
      group.waits = outcome == Outcome::kWait;
      if (group.waits) return moved;
      moved = true;
      if (outcome == Outcome::kExit) {
        group.pc += 1;
        exit(warp, mask);
        if (number < warp.groups.size()) continue;
        return true;
      }
      jump(warp, number, outcome == Outcome::kJump ? context_.taken : 0, op.label);
      if (outcome == Outcome::kYield) return true;
      if (spins_.on() && outcome == Outcome::kJump && op.label <= from) {
        spins_.loop(warp, from, context_.taken);
        return true;
      }
      if (warp.groups.size() > 1 && meets(warp, number)) return true;
    }
    return moved;
  }

  Outcome execute(Warp& warp, Group& group, const Op& op, Mask mask) {
    if (mask == 0) return Outcome::kNext;
    if (warp.matrices != nullptr) check_matrix_registers(context_, op);
    const bool watched = spins_.on();
    if (watched) spins_.before(context_, op, mask);
    const Outcome outcome = perform(warp, op, mask);
    if (watched) spins_.after(context_, op, mask);
    Tally& tally = warp.tallies[group.pc];
    if (launch_.events != nullptr) record(warp, group, mask, outcome);
    if (outcome == Outcome::kWait) {
      ++tally.tries;
      return outcome;
    }
    const auto threads = static_cast<std::uint64_t>(std::popcount(mask));
    counters_.instructions += threads;
    tally.executed += 1;
    tally.threads += threads;
    tally.bytes += std::exchange(context_.bytes, 0);
    acted_ += op.acts ? 1 : 0;
    if (op.changes && !std::exchange(context_.unchanged, false)) ++changed_;
    if (++counters_.statements > launch_.max_statements) {
      throw PtxError("no end after " + std::to_string(launch_.max_statements) + " statements; " +
                     where(warp, group));
    }
    return outcome;
  }

  void record(const Warp& warp, const Group& group, Mask mask, Outcome outcome) {
    launch_.events->add({counters_.statements, warp.block->number, warp.index, group.pc, mask,
                         outcome == Outcome::kWait ? std::uint32_t{1} : 0});
  }

  Outcome perform(Warp& warp, const Op& op, Mask mask) {
    while (mask != 0) {
      try {
        return op.handler(context_, op, mask);
      } catch (const Unwritten& found) {
        for (const Value& v : op.targets) {
          if (v.kind == Value::Kind::kRegister) warp.written[v.index] &= ~found.lanes;
        }
        mask &= ~found.lanes;
      }
    }
    return Outcome::kNext;
  }

  void jump(Warp& warp, std::size_t number, Mask taken, int label) {
    Group& group = warp.groups[number];
    if (taken == group.mask) {
      group.pc = label;
      return;
    }
    group.pc += 1;
    if (taken == 0) return;
    group.mask &= ~taken;
    warp.groups.push_back({taken, label});
  }

  static bool meets(const Warp& warp, std::size_t number) {
    for (std::size_t i = 0; i < warp.groups.size(); ++i) {
      if (i != number && warp.groups[i].pc == warp.groups[number].pc) return true;
    }
    return false;
  }

  // Groups at the same statement become one, unless one has arrived at a barrier there already.
  static void merge(Warp& warp) {
    for (std::size_t i = 0; i < warp.groups.size(); ++i) {
      for (std::size_t j = warp.groups.size() - 1; j > i; --j) {
        Group& a = warp.groups[i];
        const Group& b = warp.groups[j];
        if (a.pc != b.pc || a.barrier >= 0 || b.barrier >= 0) continue;
        a.mask |= b.mask;
        warp.groups.erase(warp.groups.begin() + static_cast<std::ptrdiff_t>(j));
      }
    }
  }

  template <class F>
  void each_warp(F&& f) const {
    for (const auto& cluster : clusters_) {
      for (const auto& block : cluster->blocks) {
        for (Warp& warp : block->warps) f(warp);
      }
    }
  }

  void exit(Warp& warp, Mask mask) {
    leave_cluster(warp, mask);
    warp.alive &= ~mask;
    for (Group& group : warp.groups) group.mask &= ~mask;
    std::erase_if(warp.groups, [](const Group& group) { return group.mask == 0; });
    if (!warp.groups.empty()) return;
    --warp.block->running;
    races_.leave(warp);
    if (warp.block->warpgroups != nullptr) leave_warpgroup(context_, warp);
    if (warp.block->running != 0) return;
    if (!std::exchange(warp.block->released, true)) ++context_.releasing;
    --warp.block->cluster->running;
    engine_.block_ended(context_, *warp.block);
  }

  std::string where(const Warp& warp, const Group& group) const {
    const Dim& b = warp.block->index;
    char lanes[16];
    std::snprintf(lanes, sizeof(lanes), "%08x", group.mask);
    std::string text = "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
                       std::to_string(b.z) + "), warp " + std::to_string(warp.index) + ", lanes " +
                       lanes + ": ";
    return text + program_.module->describe(*program_.kernel, *program_.ops[group.pc].statement);
  }

  // What threads do that have not ended, by block; warps that do the same in one line.
  std::string standing() const { return describe_standing(context_, clusters_); }

  [[noreturn]] void deadlock() const {
    std::string text = "deadlock: every thread waits" + standing();
    if (tenant_.waiting != 0) {
      text += "\n  " + std::to_string(tenant_.waiting * tenant_.size) +
              " more blocks have no room on a multiprocessor";
    }
    throw PtxError(text);
  }

  Machine& machine_;
  std::shared_ptr<const Allocations> memory_;  // as of this round
  const Program& program_;
  const Launch& launch_;
  Counters counters_;
  Context context_;
  std::mt19937_64 random_;
  Workspace workspace_;
  Engine engine_;
  Races races_;
  Tenant tenant_;
  Spins spins_;
  std::uint64_t next_ = 0;     // cluster to be started
  std::uint32_t started_ = 0;  // blocks
  std::uint64_t acted_ = 0;    // statements that others can see
  std::uint64_t changed_ = 0;  // those that have changed memory
  bool released_ = false;      // the next launch
  std::vector<std::unique_ptr<Cluster>> clusters_;
};

}  // namespace

Counters execute(Machine& machine, const Program& program, const Launch& launch) {
  return Execution(machine, program, launch).run();
}

const Lanes& read(Context& c, const Op& op, int number, Mask mask) {
  const Value& v = op.values[number];
  switch (v.kind) {
    case Value::Kind::kRegister: {
      const Mask missing = mask & ~c.warp->written[v.index];
      if (missing != 0) {
        if (op.propagates) throw Unwritten{missing};
        const auto& loaded = c.warp->order->loaded_nothing;
        const auto from = loaded.find(v.index);
        c.fail(
            op, std::countr_zero(missing),
            "register " + c.program.kernel->registers[v.index].name +
                " is read but was never written, or was made from one that was not" +
                (from == loaded.end()
                     ? ""
                     : "; or it was loaded from memory that was never written (" +
                           c.program.module->describe(*c.program.kernel, *from->second->statement) +
                           ")"));
      }
      return c.warp->registers[v.index];
    }
    case Value::Kind::kConstant:
      return *v.constant;
    case Value::Kind::kSpecial:
      v.special(c, c.scratch[number % 7]);
      return c.scratch[number % 7];
    default:
      c.fail(op, "operand " + std::to_string(number) + " is of another kind");
  }
}

Mask read_predicate(Context& c, const Op& op, const Value& v, Mask mask) {
  if (v.kind == Value::Kind::kSpecial) {  // %is_explicit_cluster
    Lanes lanes;
    v.special(c, lanes);
    return lanes[0] != 0 ? ~Mask{0} : 0;
  }
  const Mask missing = mask & ~c.warp->predicates_written[v.index];
  if (missing != 0) {
    c.fail(op, std::countr_zero(missing),
           "predicate " + c.program.kernel->predicates[v.index] + " is read but was never written");
  }
  const Mask bits = c.warp->predicates[v.index];
  return v.negated ? ~bits : bits;
}

}  // namespace ptx_machine
