// Clusters: addresses of shared memory, barrier.cluster, setmaxnreg, fences.
#include <algorithm>

#include "races.h"

namespace ptx_machine {

Place shared_place(Context& c, const Op& op, int lane, Space space, std::uint64_t address) {
  if (space == Space::kGeneric) {
    if (address < kSharedWindow) c.fail(op, lane, "the address is not one of shared memory");
    address -= kSharedWindow;
  }
  address &= 0xFFFFFFFF;
  Block* own = c.warp->block;
  const std::uint64_t rank = address >> kRankShift;
  if (rank == 0 || rank == own->rank + 1) return {own, address & kOffsetMask};
  const auto& blocks = own->cluster->blocks;
  if (rank > blocks.size()) {
    c.fail(op, lane,
           "the address " + std::to_string(address) + " is not one of shared memory of the " +
               std::to_string(blocks.size()) + " blocks of the cluster");
  }
  const std::string whose =
      "shared memory of block " + std::to_string(rank - 1) + " of the cluster";
  if (space == Space::kShared) {
    c.fail(op, lane, "shared::cta is the thread's own block, and the address is in " + whose);
  }
  Block* other = blocks[rank - 1].get();
  if (other->running == 0) c.fail(op, lane, whose + ", which has ended");
  return {other, address & kOffsetMask};
}

Place shared_range(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                   std::uint64_t bytes, std::uint64_t align) {
  const Place place = shared_place(c, op, lane, space, address);
  const std::uint64_t size = place.block->shared.size();
  if (place.offset % align != 0) {
    c.fail(op, lane,
           "offset " + std::to_string(place.offset) + " of shared memory is not aligned to " +
               std::to_string(align) + " bytes");
  }
  if (place.offset > size || bytes > size - place.offset) {
    c.fail(op, lane,
           "access of " + std::to_string(bytes) + " bytes at " + std::to_string(place.offset) +
               " of shared memory, which has " + std::to_string(size));
  }
  return place;
}

namespace {

// Lets some lanes go on behind the statement while the others stay there.
Outcome keep_waiting(Context& c, Mask waiting) {
  if (waiting == c.group->mask) return Outcome::kWait;
  c.taken = waiting;
  return Outcome::kJump;
}

void complete_if_all_came(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  cluster.phase = !cluster.phase;
  complete_in_order(cluster);
}

Mask in_phase(const Warp& warp, bool phase) {
  return phase ? warp.cluster_barrier_phase : ~warp.cluster_barrier_phase;
}

Outcome arrive_at_cluster(Context& c, const Op& op, Mask mask) {
  Warp& warp = *c.warp;
  if (op.flag && !have_met(c, op, mask, warp.alive)) return Outcome::kWait;
  if (const Mask twice = mask & warp.at_cluster_barrier; twice != 0) {
    c.fail(op, std::countr_zero(twice), "arrives at the cluster's barrier twice, without a wait");
  }
  Cluster& cluster = *warp.block->cluster;
  warp.at_cluster_barrier |= mask;
  warp.cluster_barrier_phase =
      cluster.phase ? warp.cluster_barrier_phase | mask : warp.cluster_barrier_phase & ~mask;
  cluster.arrived += static_cast<std::uint64_t>(std::popcount(mask));
  arrive_in_order(c, op, cluster, mask);
  complete_if_all_came(cluster);
  return Outcome::kNext;
}

Outcome wait_at_cluster(Context& c, const Op& op, Mask mask) {
  Warp& warp = *c.warp;
  if (op.flag && !have_met(c, op, mask, warp.alive)) return Outcome::kWait;
  if (const Mask not_there = mask & ~warp.at_cluster_barrier; not_there != 0) {
    c.fail(op, std::countr_zero(not_there), "waits at the cluster's barrier without an arrival");
  }
  // A thread does not arrive again before it has waited, so a phase that is not this one is over.
  const Mask waiting = mask & in_phase(warp, warp.block->cluster->phase);
  if (op.flag && waiting != 0) return Outcome::kWait;
  warp.at_cluster_barrier &= ~(mask & ~waiting);
  wait_in_order(c, *warp.block->cluster, mask & ~waiting);
  return waiting == 0 ? Outcome::kNext : keep_waiting(c, waiting);
}

// mapa: the same place in the shared memory of the block of a rank.
Outcome map_address(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask), ranks = read(c, op, 1, mask);
  const bool generic = op.space == Space::kGeneric;
  const std::uint64_t size = c.warp->block->cluster->blocks.size();
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const Space own = generic ? Space::kGeneric : Space::kShared;
    const Place place = shared_place(c, op, l, own, address_of(op, 0, base, l));
    const std::uint64_t rank = static_cast<std::uint32_t>(ranks[l]);
    if (rank >= size) {
      c.fail(
          op, l,
          "rank " + std::to_string(rank) + " in a cluster of " + std::to_string(size) + " blocks");
    }
    d[l] = (generic ? kSharedWindow : 0) + ((rank + 1) << kRankShift) + place.offset;
  });
  return Outcome::kNext;
}

Outcome rank_of_address(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    d[l] = shared_place(c, op, l, op.space, address_of(op, 0, base, l)).block->rank;
  });
  return Outcome::kNext;
}

bool is_in(Context& c, Space space, std::uint64_t address) {
  const bool shared = address >= kSharedWindow;
  const bool local = !shared && address >= kLocalWindow;
  const bool param = !shared && !local && address >= kParamWindow;
  if (space == Space::kLocal) return local;
  if (space == Space::kParam) return param;
  if (space == Space::kGlobal) return !shared && !local && !param;
  if (!shared) return false;
  const std::uint64_t rank = (address & 0xFFFFFFFF) >> kRankShift;
  const bool own = rank == 0 || rank == c.warp->block->rank + 1;
  return own || (space == Space::kCluster && rank <= c.warp->block->cluster->blocks.size());
}

Outcome is_in_space(Context& c, const Op& op, Mask mask) {
  const Lanes& addresses = read(c, op, 0, mask);
  Mask found = 0;
  each(mask, [&](int l) { found |= Mask{is_in(c, op.space, addresses[l])} << l; });
  write_predicate(c, op.targets[0], mask, found);
  return Outcome::kNext;
}

// setmaxnreg: registers of a warp go to the block's pool (.dec) and come from there (.inc, op.flag).
// ptxas ignores it where it does not know how many registers the kernel starts with; here it counts
// all the same.
Outcome set_registers(Context& c, const Op& op, Mask mask) {
  Warp& warp = *c.warp;
  if (!have_met(c, op, mask, warp.alive)) return Outcome::kWait;
  const int lane = std::countr_zero(mask);
  const std::uint64_t wanted = read(c, op, 0, mask)[lane], held = warp.max_registers;
  if (wanted < 24 || wanted > 256 || wanted % 8 != 0) {
    c.fail(op, lane, "registers must be 24 to 256, and a multiple of 8");
  }
  if (op.flag ? wanted < held : wanted > held) {
    c.fail(op, lane,
           "a thread has " + std::to_string(held) + " registers and " +
               (op.flag ? "requests fewer" : "releases to more"));
  }
  std::uint64_t& pool = warp.block->free_registers;
  if (op.flag) {
    const std::uint64_t more = (wanted - held) * kLanes;
    if (pool < more) return Outcome::kWait;
    pool -= more;
  } else {
    pool += (held - wanted) * kLanes;
  }
  warp.max_registers = wanted;
  return Outcome::kNext;
}

bool decode_barrier(const Statement& s, Op& op) {
  op.written = 0;
  op.flag = has(s, "aligned");
  if (s.opcode.size() < 3 || !s.operands.empty()) return false;
  if (s.opcode[2] == "arrive") {
    op.order.releases = !has(s, "relaxed");
    op.handler = arrive_at_cluster;
    return has_no_other(s, {"cluster", "arrive", "release", "relaxed", "aligned"});
  }
  op.handler = wait_at_cluster;
  return s.opcode[2] == "wait" && has_no_other(s, {"cluster", "wait", "acquire", "aligned"});
}

}  // namespace

void leave_cluster(Warp& warp, Mask mask) {
  Cluster& cluster = *warp.block->cluster;
  const Mask arrived = mask & warp.at_cluster_barrier & in_phase(warp, cluster.phase);
  cluster.threads -= static_cast<std::uint64_t>(std::popcount(mask));
  cluster.arrived -= static_cast<std::uint64_t>(std::popcount(arrived));
  complete_if_all_came(cluster);
}

bool decode_cluster(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "barrier" && has(s, "cluster")) return decode_barrier(s, op);
  op.space = space_of(s);
  if (name == "mapa") {
    op.handler = map_address;
    return has_no_other(s, {"shared::cluster", "u32", "u64"});
  }
  if (name == "getctarank") {
    op.handler = rank_of_address;
    return has_no_other(s, {"shared::cluster", "u32", "u64"});
  }
  if (name == "isspacep") {
    op.handler = is_in_space;
    return op.space != Space::kGeneric && op.space != Space::kConst && s.opcode.size() == 2;
  }
  if (name == "setmaxnreg") {
    op.written = 0;
    op.flag = has(s, "inc");
    op.handler = set_registers;
    return (op.flag != has(s, "dec")) && has(s, "sync") && has(s, "aligned") &&
           has_no_other(s, {"inc", "dec", "sync", "aligned", "u32"});
  }
  return false;
}

}  // namespace ptx_machine
