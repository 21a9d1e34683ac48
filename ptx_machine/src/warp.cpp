// Control flow, barriers, and what the lanes of a warp do together.
#include <algorithm>
#include <utility>

#include "races.h"

namespace ptx_machine {

bool have_met(Context& c, const Op& op, Mask mask, Mask named) {
  const Mask missing = named & c.warp->alive & ~mask;
  if (missing == 0) return true;
  // Lanes that wait elsewhere for this group, or at a barrier, never come.
  for (const Group& other : c.warp->groups) {
    if ((other.mask & missing) != 0 && other.barrier >= 0) {
      c.fail(op, std::countr_zero(missing),
             "the warp has diverged: another part of it waits at a barrier");
    }
  }
  return false;
}

namespace {

Outcome branch(Context& c, const Op&, Mask mask) {
  c.taken = mask;
  return Outcome::kJump;
}

Outcome leave(Context&, const Op&, Mask) { return Outcome::kExit; }

Outcome nothing(Context&, const Op&, Mask) { return Outcome::kNext; }

Outcome sleep(Context& c, const Op&, Mask) {
  c.slept = true;
  return Outcome::kYield;
}

// Of a launch that started early: everything that the launch before it did is visible behind it.
Outcome await_predecessor(Context& c, const Op&, Mask mask) {
  if (!c.launch.predecessor_ended) return Outcome::kNext;
  if (!c.launch.predecessor_ended()) {
    c.outside = true;
    return Outcome::kWait;
  }
  c.races->acquire_ended(c, mask);
  return Outcome::kNext;
}

Outcome release_next(Context& c, const Op&, Mask) {
  if (!std::exchange(c.warp->block->released, true)) ++c.releasing;
  return Outcome::kNext;
}

Outcome trap(Context& c, const Op& op, Mask mask) { c.fail(op, std::countr_zero(mask), "trap"); }

Mask named_lanes(Context& c, const Op& op, int number, Mask mask) {
  const Lanes& lanes = read(c, op, number, mask);
  const auto named = static_cast<Mask>(lanes[std::countr_zero(mask)]);
  each(mask, [&](int l) {
    if ((named >> l & 1) == 0) c.fail(op, l, "a lane is not in its own mask of members");
  });
  return named;
}

// Executes a statement whose operand kMembers names the lanes that take part. Lanes that name different
// ones, such as the tiles of a warp, are groups of their own. They go on when all of these have met.
template <Handler kStatement, int kMembers>
Outcome by_members(Context& c, const Op& op, Mask mask) {
  const Lanes lanes = read(c, op, kMembers, mask);
  const auto with_first = [&](Mask rest) {
    const auto named = static_cast<Mask>(lanes[std::countr_zero(rest)]);
    Mask found = 0;
    each(rest, [&](int l) { found |= Mask{static_cast<Mask>(lanes[l]) == named} << l; });
    return found;
  };
  if (with_first(mask) == mask) return kStatement(c, op, mask);
  for (Mask rest = mask; rest != 0; rest &= ~with_first(rest)) {
    const Mask group = with_first(rest);
    if (!have_met(c, op, group, named_lanes(c, op, kMembers, group))) return Outcome::kWait;
  }
  for (Mask rest = mask; rest != 0; rest &= ~with_first(rest)) kStatement(c, op, with_first(rest));
  return Outcome::kNext;
}

Outcome sync_warp(Context& c, const Op& op, Mask mask) {
  if (!have_met(c, op, mask, named_lanes(c, op, 0, mask))) return Outcome::kWait;
  meet_in_warp(c, mask);
  return Outcome::kNext;
}

// -- barriers of a block -----------------------------------------------------------------------------

// Returns how many threads a barrier waits for, rounded up to warps.
std::uint64_t expected_at(Context& c, const Op& op, Mask mask) {
  const bool counted = op.values.size() > 1 && op.values[1].kind != Value::Kind::kPredicate;
  // Warps that have ended are not waited for.
  if (!counted) return std::uint64_t{c.warp->block->running} * kLanes;
  const int lane = std::countr_zero(mask);
  const std::uint64_t threads = read(c, op, 1, mask)[lane];
  if (threads == 0 || threads % kLanes != 0) {
    c.fail(op, lane, "a barrier of " + std::to_string(threads) + " threads, not of whole warps");
  }
  return threads;
}

void arrive(Context& c, const Op& op, Mask mask, Barrier& b) {
  if (op.number != 0) {
    const Mask bits = read_predicate(c, op, op.values.back(), mask) & mask;
    b.all = b.all && bits == mask;
    b.any = b.any || bits != 0;
    b.count += static_cast<std::uint32_t>(std::popcount(bits));
  }
  b.arrived += kLanes;
}

void complete(Barrier& b) {
  b.last_all = b.all;
  b.last_any = b.any;
  b.last_count = b.count;
  b.arrived = b.count = 0;
  b.all = true;
  b.any = false;
  b.phase += 1;
}

// barrier.sync, .arrive (op.flag) and .red (op.number).
Outcome barrier(Context& c, const Op& op, Mask mask) {
  Group& group = *c.group;
  const int lane = std::countr_zero(mask);
  const auto number = op.values.empty() ? 0 : read(c, op, 0, mask)[lane];
  if (number >= c.warp->block->barriers.size()) c.fail(op, lane, "there are 16 barriers");
  Barrier& b = c.warp->block->barriers[number];
  if (group.barrier < 0) {
    if (!have_met(c, op, mask, c.warp->alive)) return Outcome::kWait;
    group.barrier = static_cast<int>(number);
    group.phase = b.phase;
    arrive(c, op, mask, b);
    arrive_at_barrier(c, number, mask);
  }
  if (b.phase == group.phase) {
    const std::uint64_t expected = expected_at(c, op, mask);
    if (b.arrived > expected) c.fail(op, lane, "more threads arrive at a barrier than it expects");
    if (b.arrived == expected) {
      complete(b);
      complete_barrier(*c.warp->block, number);
    }
  }
  if (!op.flag && b.phase == group.phase) return Outcome::kWait;
  group.barrier = -1;
  if (!op.flag) leave_barrier(c, number, mask);
  if (op.number == 1) write_predicate(c, op.targets[0], mask, b.last_all ? ~Mask{0} : 0);
  if (op.number == 2) write_predicate(c, op.targets[0], mask, b.last_any ? ~Mask{0} : 0);
  if (op.number == 3) {
    Lanes& d = write(c, op, 0, mask);
    each(mask, [&](int l) { d[l] = b.last_count; });
  }
  return Outcome::kNext;
}

bool decode_barrier(const Statement& s, Op& op) {
  if (has(s, "cluster")) return false;  // cluster.cpp
  if (has(s, "warp")) {
    op.handler = by_members<sync_warp, 0>;
    op.written = 0;
    return true;
  }
  op.flag = has(s, "arrive");
  if (has(s, "red")) {
    op.number = has(s, "and") ? 1 : has(s, "or") ? 2 : 3;
  } else {
    op.written = 0;
    if (!op.flag && !has(s, "sync")) return false;
  }
  op.handler = barrier;
  return true;
}

// -- lanes -------------------------------------------------------------------------------------------

enum Shuffle { kUp, kDown, kButterfly, kIndex };

// PTX ISA, shfl.sync: c holds the clamp in bits 0 to 4 and the mask of segments in bits 8 to 12.
Outcome shuffle(Context& c, const Op& op, Mask mask) {
  const Mask named = named_lanes(c, op, 3, mask);
  if (!have_met(c, op, mask, named)) return Outcome::kWait;
  // A lane may give what it never wrote, as others than the leader do in warp-aggregated atomics. Where
  // it is received, it was not written either.
  const Value& given = op.values[0];
  const bool in_register = given.kind == Value::Kind::kRegister;
  const Mask lacking = in_register ? mask & ~c.warp->written[given.index] : 0;
  const Lanes a = in_register ? c.warp->registers[given.index] : read(c, op, 0, mask);
  const Lanes b = read(c, op, 1, mask), e = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  Mask valid = 0, unwritten = 0;
  each(mask, [&](int lane) {
    const int by = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(e[lane] & 31);
    const int segment = static_cast<int>(e[lane] >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = 0;
    bool inside = false;
    switch (op.number) {
      case kUp:
        from = lane - by;
        inside = from >= most;
        break;
      case kDown:
        from = lane + by;
        inside = from <= most;
        break;
      case kButterfly:
        from = lane ^ by;
        inside = from <= most;
        break;
      default:
        from = least | (by & ~segment);
        inside = from <= most;
        break;
    }
    if (!inside) from = lane;
    if ((mask >> from & 1) == 0) {
      c.fail(op, lane, "reads lane " + std::to_string(from) + ", which does not take part");
    }
    d[lane] = a[from];
    valid |= Mask{inside} << lane;
    unwritten |= (lacking >> from & 1) << lane;
  });
  if (unwritten != 0 && op.targets[0].kind == Value::Kind::kRegister) {
    c.warp->written[op.targets[0].index] &= ~unwritten;
  }
  if (op.targets.size() > 1) write_predicate(c, op.targets[1], mask, valid);
  return Outcome::kNext;
}

Outcome vote(Context& c, const Op& op, Mask mask) {
  const Mask named = named_lanes(c, op, 1, mask);
  if (!have_met(c, op, mask, named)) return Outcome::kWait;
  const Mask bits = read_predicate(c, op, op.values[0], mask) & mask;
  if (op.number == 3) {
    Lanes& d = write(c, op, 0, mask);
    each(mask, [&](int l) { d[l] = bits; });
    return Outcome::kNext;
  }
  const bool all = bits == mask, any = bits != 0;
  const bool out = op.number == 0 ? all : op.number == 1 ? any : all || !any;
  write_predicate(c, op.targets[0], mask, out ? ~Mask{0} : 0);
  return Outcome::kNext;
}

Outcome elect(Context& c, const Op& op, Mask mask) {
  const Mask named = named_lanes(c, op, 0, mask);
  if (!have_met(c, op, mask, named)) return Outcome::kWait;
  const int leader = std::countr_zero(mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = leader; });
  write_predicate(c, op.targets[1], mask, Mask{1} << leader);
  return Outcome::kNext;
}

Outcome reduce(Context& c, const Op& op, Mask mask) {
  const Mask named = named_lanes(c, op, 1, mask);
  if (!have_met(c, op, mask, named)) return Outcome::kWait;
  const Lanes a = read(c, op, 0, mask);
  const int first = std::countr_zero(mask);
  auto total = static_cast<std::uint32_t>(a[first]);
  each(mask & (mask - 1), [&](int l) {
    const auto x = static_cast<std::uint32_t>(a[l]);
    const auto sx = static_cast<std::int32_t>(x), st = static_cast<std::int32_t>(total);
    switch (op.number) {
      case 0:
        total += x;
        break;
      case 1:
        total &= x;
        break;
      case 2:
        total |= x;
        break;
      case 3:
        total ^= x;
        break;
      case 4:
        total =
            is_signed(op.type) ? static_cast<std::uint32_t>(std::min(sx, st)) : std::min(x, total);
        break;
      default:
        total =
            is_signed(op.type) ? static_cast<std::uint32_t>(std::max(sx, st)) : std::max(x, total);
        break;
    }
  });
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = total; });
  return Outcome::kNext;
}

// match.any: the lanes that have the same value. match.all (op.flag): all lanes, if their values are one.
Outcome match(Context& c, const Op& op, Mask mask) {
  const Mask named = named_lanes(c, op, 1, mask);
  if (!have_met(c, op, mask, named)) return Outcome::kWait;
  const Lanes a = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type);
  Lanes& d = write(c, op, 0, mask);
  Mask all = ~Mask{0};
  each(mask, [&](int lane) {
    Mask same = 0;
    each(mask, [&](int l) { same |= Mask{cut(a[l], bytes) == cut(a[lane], bytes)} << l; });
    d[lane] = same;
    if (same != mask) all = 0;
  });
  if (!op.flag) return Outcome::kNext;
  each(mask, [&](int lane) { d[lane] &= all; });
  if (op.targets.size() > 1) write_predicate(c, op.targets[1], mask, all);
  return Outcome::kNext;
}

bool decode_match(const Statement& s, Op& op) {
  op.handler = by_members<match, 1>;
  op.flag = s.opcode.size() == 4 && s.opcode[1] == "all";
  return s.opcode.size() == 4 && (op.flag || s.opcode[1] == "any") && s.opcode[2] == "sync" &&
         (op.type == Type::kB32 || op.type == Type::kB64) && (op.flag || s.operands[0].second < 0);
}

Outcome active(Context& c, const Op& op, Mask mask) {
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = mask; });
  return Outcome::kNext;
}

int position(const Statement& s, std::initializer_list<const char*> names) {
  int number = 0;
  for (const char* name : names) {
    if (has(s, name)) return number;
    ++number;
  }
  return -1;
}

bool decode_lanes(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "shfl") {
    op.number = position(s, {"up", "down", "bfly", "idx"});
    op.handler = by_members<shuffle, 3>;
  } else if (name == "vote") {
    op.number = position(s, {"all", "any", "uni", "ballot"});
    op.handler = by_members<vote, 1>;
  } else if (name == "redux") {
    op.number = position(s, {"add", "and", "or", "xor", "min", "max"});
    op.handler = by_members<reduce, 1>;
  } else if (name == "elect") {
    op.handler = by_members<elect, 0>;
  } else if (name == "match") {
    return decode_match(s, op);
  } else if (name == "activemask") {
    op.handler = active;
  } else {
    return false;
  }
  return op.number >= 0;
}

}  // namespace

bool decode_warp(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "bar" || name == "barrier") return decode_barrier(s, op);
  if (decode_lanes(s, op)) return true;
  if (name == "membar" || name == "fence") return decode_fence(s, op);
  op.handler = nullptr;  // of one with modifiers that are not known
  op.written = 0;
  if (name == "bra") op.handler = branch;
  if (name == "ret" || name == "exit") op.handler = leave;
  if (name == "trap") op.handler = trap;
  if (name == "nanosleep") op.handler = sleep;
  if (name == "prefetch" || name == "prefetchu") op.handler = nothing;
  if (name == "griddepcontrol" && s.opcode.size() == 2) {
    if (s.opcode[1] == "wait") op.handler = await_predecessor;
    if (s.opcode[1] == "launch_dependents") op.handler = release_next;
  }
  return op.handler != nullptr;
}

}  // namespace ptx_machine
