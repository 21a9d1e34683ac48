// mbarrier instructions.
//
// An object lies in its eight bytes of shared memory: bits 0 to 19 pending, 20 to 39 expected, 40 to 60
// the tx-count, 61 the parity of the phase, 62 to 63 a mark. Block::mbarriers holds a copy, so that an
// object that was overwritten is told from a valid one whatever was written. PTX leaves the layout open.
#include "mbarrier.h"

#include <string>

#include "engine.h"
#include "races.h"

namespace ptx_machine {
namespace {

constexpr std::uint64_t kField = (1 << 20) - 1;
constexpr std::uint64_t kMark = 2;
constexpr int kMostRefusals = 3;  // try_wait that return false, before one has to wait

std::uint64_t encode(const Mbarrier& m) {
  return static_cast<std::uint64_t>(m.pending) | static_cast<std::uint64_t>(m.expected) << 20 |
         (static_cast<std::uint64_t>(m.bytes) & 0x1FFFFF) << 40 | std::uint64_t{m.phase} << 61 |
         kMark << 62;
}

Mbarrier decode(std::uint64_t word) {
  Mbarrier m;
  m.pending = static_cast<std::int64_t>(word & kField);
  m.expected = static_cast<std::int64_t>(word >> 20 & kField);
  m.bytes = static_cast<std::int64_t>(word << 3) >> 43;  // with its sign
  m.phase = (word >> 61 & 1) != 0;
  return m;
}

void set(const Place& place, const Mbarrier& m) {
  const std::uint64_t word = encode(m);
  std::memcpy(place.block->shared.data() + place.offset, &word, sizeof(word));
  place.block->mbarriers[place.offset] = word;
}

// Stores a changed object. Its phase ends when neither arrivals nor bytes are missing.
void update(const Place& place, Mbarrier m) {
  if (m.pending == 0 && m.bytes == 0) {
    const std::uint32_t copies = copies_under_way({place.block, place.offset});
    if (copies != 0) {
      throw MbarrierError("a phase of an mbarrier ends before " + std::to_string(copies) +
                          " of its copies: it expects fewer bytes than they bring");
    }
    m.pending = m.expected;
    m.phase = !m.phase;
    complete_phase({place.block, place.offset});
  }
  set(place, m);
}

void change_bytes(Mbarrier& m, std::int64_t by) {
  m.bytes += by;
  if (m.bytes > kMostCount || m.bytes < -kMostCount) {
    throw MbarrierError("the tx-count of an mbarrier becomes " + std::to_string(m.bytes) +
                        ", out of its range");
  }
}

void arrive(Mbarrier& m, std::int64_t count) {
  if (count < 1 || count > kMostCount) {
    throw MbarrierError("an arrival with a count of " + std::to_string(count));
  }
  if (count > m.pending) {
    throw MbarrierError("more arrivals at an mbarrier than it expects: " + std::to_string(count) +
                        " come, " + std::to_string(m.pending) + " are pending");
  }
  m.pending -= count;
}

bool is_object(const Place& place, std::uint64_t* word) {
  const auto found = place.block->mbarriers.find(place.offset);
  if (found == place.block->mbarriers.end()) return false;
  std::memcpy(word, place.block->shared.data() + place.offset, sizeof(*word));
  return *word == found->second;
}

// Calls f(lane, place) with the object that operand 0 names.
template <class F>
void each_place(Context& c, const Op& op, Mask mask, F&& f) {
  const Lanes base = read(c, op, 0, mask);
  each(mask, [&](int l) {
    const Place place = shared_range(c, op, l, op.space, address_of(op, 0, base, l), 8, 8);
    try {
      f(l, place);
    } catch (const MbarrierError& error) {
      c.fail(op, l, error.what());
    }
  });
}

Lanes value_or(Context& c, const Op& op, int number, Mask mask, std::uint64_t otherwise) {
  if (number < static_cast<int>(op.values.size())) return read(c, op, number, mask);
  Lanes values;
  values.fill(otherwise);
  return values;
}

std::int64_t count_in(const Lanes& lanes, int lane) {
  return static_cast<std::int64_t>(static_cast<std::uint32_t>(lanes[lane]));
}

Outcome initialise(Context& c, const Op& op, Mask mask) {
  const Lanes counts = read(c, op, 1, mask);
  each_place(c, op, mask, [&](int l, const Place& place) {
    std::uint64_t word = 0;
    if (is_object(place, &word)) {
      throw MbarrierError("an mbarrier is initialised twice, without mbarrier.inval");
    }
    const std::int64_t count = count_in(counts, l);
    if (count < 1 || count > kMostCount) {
      throw MbarrierError("an mbarrier for " + std::to_string(count) + " arrivals");
    }
    begin_mbarrier(c, op, l, {place.block, place.offset});
    set(place, {count, count, 0, false});
  });
  return Outcome::kNext;
}

Outcome wait(Context& c, const Op& op, Mask mask);

// Whether a thread waits for an object: it stands at a try_wait.
bool is_awaited(Context& c, const Place& place) {
  const Block* block = place.block;
  for (const Warp& warp : block->warps) {
    for (const Group& group : warp.groups) {
      if (group.pc >= static_cast<int>(c.program.ops.size())) continue;
      const Op& op = c.program.ops[group.pc];
      if (op.handler != wait || !op.flag) continue;
      const Value& address = op.values[0];
      const bool fixed = address.kind == Value::Kind::kConstant;
      const Lanes& base = fixed ? *address.constant : warp.registers[address.index];
      bool found = false;
      each(fixed ? group.mask : group.mask & warp.written[address.index],
           [&](int l) { found |= (address_of(op, 0, base, l) & kOffsetMask) == place.offset; });
      if (found) return true;
    }
  }
  return false;
}

Outcome invalidate(Context& c, const Op& op, Mask mask) {
  each_place(c, op, mask, [&](int l, const Place& place) {
    load_mbarrier(place);
    if (is_awaited(c, place))
      throw MbarrierError("mbarrier.inval of an object with waiting threads");
    touch_mbarrier(c, op, l, {place.block, place.offset}, Use::kWrite);
    place.block->mbarriers.erase(place.offset);
  });
  return Outcome::kNext;
}

// expect_tx, and complete_tx (op.flag).
Outcome count_bytes(Context& c, const Op& op, Mask mask) {
  const Lanes bytes = read(c, op, 1, mask);
  each_place(c, op, mask, [&](int l, const Place& place) {
    Mbarrier m = load_mbarrier(place);
    touch_mbarrier(c, op, l, {place.block, place.offset}, Use::kAtomic);
    const std::int64_t by = count_in(bytes, l);
    change_bytes(m, op.flag ? -by : by);
    update(place, m);
  });
  return Outcome::kNext;
}

enum Arrival { kArrive = 0, kDrop = 1, kExpect = 2, kNoComplete = 4 };

// arrive and arrive_drop, with .expect_tx and .noComplete. The state is the object before.
Outcome arrive(Context& c, const Op& op, Mask mask) {
  const Lanes given = value_or(c, op, 1, mask, 1);
  const bool has_state = op.targets[0].kind == Value::Kind::kRegister;
  each_place(c, op, mask, [&](int l, const Place& place) {
    if (has_state && place.block != c.warp->block) {
      throw MbarrierError("an arrival at another block returns no state");
    }
    Mbarrier m = load_mbarrier(place);
    arrive_at_mbarrier(c, op, l, {place.block, place.offset});
    const std::uint64_t state = encode(m);
    const std::int64_t count = (op.number & kExpect) != 0 ? 1 : count_in(given, l);
    if ((op.number & kExpect) != 0) change_bytes(m, count_in(given, l));
    if ((op.number & kDrop) != 0) {
      if (count > m.expected) throw MbarrierError("more threads drop out than an mbarrier expects");
      m.expected -= count;
    }
    arrive(m, count);
    if ((op.number & kNoComplete) != 0 && m.pending == 0 && m.bytes == 0) {
      throw MbarrierError("an arrival with .noComplete completes the phase");
    }
    update(place, m);
    write(c, op, 0, Mask{1} << l)[l] = state;
  });
  return Outcome::kNext;
}

// test_wait and try_wait (op.flag), for the phase of a state or of a parity (op.number).
//
// PTX lets try_wait wait for a time of the system's, and return false then. Here it waits as long as
// anything can still come, so that a deadlock is noticed; with a seed it returns false a few times.
Outcome wait(Context& c, const Op& op, Mask mask) {
  const Lanes phases = read(c, op, 1, mask);
  value_or(c, op, 2, mask, 0);  // the time: a register that was never written is an error
  Mask done = 0;
  std::vector<std::pair<Spot, Mask>> passed;  // lanes of a warp wait for the same one, as a rule
  each_place(c, op, mask, [&](int l, const Place& place) {
    const Mbarrier m = load_mbarrier(place);
    if (op.number == 1 && count_in(phases, l) > 1) {
      throw MbarrierError("a parity of " + std::to_string(count_in(phases, l)));
    }
    if (op.number == 0 && phases[l] >> 62 != kMark) {
      throw MbarrierError("waits for what is no state of an mbarrier");
    }
    const bool parity = op.number == 1 ? phases[l] != 0 : decode(phases[l]).phase;
    const Spot spot{place.block, place.offset};
    touch_mbarrier(c, op, l, spot, Use::kRead);
    if (m.phase == parity) return;
    done |= Mask{1} << l;
    if (passed.empty() || passed.back().first != spot) passed.push_back({spot, 0});
    passed.back().second |= Mask{1} << l;
  });
  for (const auto& [spot, lanes] : passed) pass_mbarrier(c, op, lanes, spot);
  if (done == 0 && op.flag) {
    const bool refuses =
        c.random != nullptr && c.warp->refused_waits < kMostRefusals && (*c.random)() % 4 == 0;
    if (!refuses && c.group->mask != mask) {  // lanes whose predicate is false do not wait
      c.taken = mask;
      return Outcome::kJump;
    }
    if (!refuses) return Outcome::kWait;
    c.warp->refused_waits += 1;
  }
  if (done != 0) c.warp->refused_waits = 0;
  write_predicate(c, op.targets[0], mask, done);
  return Outcome::kNext;
}

Outcome pending_count(Context& c, const Op& op, Mask mask) {
  const Lanes states = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    if (states[l] >> 62 != kMark) c.fail(op, l, "a value that is no state of an mbarrier");
    d[l] = states[l] & kField;
  });
  return Outcome::kNext;
}

// cp.async.mbarrier.arrive: the arrival comes when the copies that the thread has started are done.
// Without .noinc (op.flag) it adds to the pending count first, so that nothing is missing in the end.
Outcome arrive_behind_copies(Context& c, const Op& op, Mask mask) {
  each_place(c, op, mask, [&](int l, const Place& place) {
    Mbarrier m = load_mbarrier(place);
    touch_mbarrier(c, op, l, {place.block, place.offset}, Use::kAtomic);
    if (!op.flag) {
      if (m.pending == kMostCount) throw MbarrierError("too many arrivals are pending");
      m.pending += 1;
      set(place, m);
    }
    Transfer arrival;
    arrival.target = place.block;
    Warp* warp = c.warp;
    const Origin origin{&op, c.thread_of(l), warp->block->index};
    arrival.write = [place, warp, l, origin, before = warp->copies_started[l],
                     group = warp->order->copies.of(l)](Context& later, const Bytes&) {
      perform_copies(later, *warp, l, before);
      try {
        arrive_with_copies(*warp, l, group, {place.block, place.offset});
        arrive_once(place);
      } catch (const MbarrierError& error) {
        fail(later, origin, error.what());
      }
    };
    c.engine->start(c, op, l, std::move(arrival));
  });
  return Outcome::kNext;
}

bool decode_copies(const Statement& s, Op& op) {
  op.written = 0;
  op.space = space_of(s);
  op.flag = has(s, "noinc");
  op.handler = arrive_behind_copies;
  return has(s, "async") && has(s, "arrive") && op.space != Space::kCluster &&
         has_no_other(s, {"async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"});
}

// Semantics are said together with their scope, or neither is.
bool has_scope(const Statement& s) {
  const bool semantics = has(s, "release") || has(s, "relaxed") || has(s, "acquire");
  return semantics == (has(s, "cta") || has(s, "cluster"));
}

bool decode_arrival(const Statement& s, Op& op) {
  const bool complete = !has(s, "noComplete");
  const bool has_state = s.operands.empty() || s.operands[0].kind != Operand::Kind::kSink;
  if (op.space == Space::kCluster && (has_state || !complete)) return false;
  if (!complete && (has(s, "relaxed") || has(s, "cluster") || has(s, "expect_tx"))) return false;
  op.number = (s.opcode[1] == "arrive_drop" ? kDrop : 0) | (has(s, "expect_tx") ? kExpect : 0) |
              (complete ? 0 : kNoComplete);
  op.handler = arrive;
  op.order = memory_order_of(s);
  op.order.releases = !has(s, "relaxed");
  return has_no_other(s, {"arrive", "arrive_drop", "expect_tx", "noComplete", "release", "relaxed",
                          "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64"});
}

bool decode_wait(const Statement& s, Op& op) {
  op.flag = s.opcode[1] == "try_wait";
  op.number = has(s, "parity") ? 1 : 0;
  op.handler = wait;
  op.order = memory_order_of(s);
  op.order.acquires = !has(s, "relaxed");
  return op.space != Space::kCluster &&
         has_no_other(s, {"test_wait", "try_wait", "parity", "acquire", "relaxed", "cta", "cluster",
                          "shared", "shared::cta", "b64"});
}

}  // namespace

Mbarrier load_mbarrier(const Place& place) {
  std::uint64_t word = 0;
  if (is_object(place, &word)) return decode(word);
  const bool was = place.block->mbarriers.contains(place.offset);
  throw MbarrierError(was ? "the mbarrier has been overwritten"
                          : "no mbarrier has been initialised at offset " +
                                std::to_string(place.offset) + " of shared memory");
}

void complete_bytes(const Place& place, std::uint64_t bytes) {
  Mbarrier m = load_mbarrier(place);
  change_bytes(m, -static_cast<std::int64_t>(bytes));
  update(place, m);
}

void arrive_once(const Place& place) {
  Mbarrier m = load_mbarrier(place);
  arrive(m, 1);
  update(place, m);
}

bool decode_mbarrier(const Statement& s, Op& op) {
  if (s.opcode[0] == "cp" && has(s, "mbarrier")) return decode_copies(s, op);
  if (s.opcode[0] != "mbarrier" || s.opcode.size() < 3 || s.opcode.back() != "b64") return false;
  if (!has_scope(s)) return false;
  const std::string& what = s.opcode[1];
  op.space = space_of(s);
  if (what == "arrive" || what == "arrive_drop") return decode_arrival(s, op);
  if (what == "test_wait" || what == "try_wait") return decode_wait(s, op);
  if (what == "pending_count") {
    op.handler = pending_count;
    return has_no_other(s, {"pending_count", "b64"});
  }
  op.written = 0;
  if (what == "expect_tx" || what == "complete_tx") {
    op.flag = what == "complete_tx";
    op.handler = count_bytes;
    return has_no_other(s, {"expect_tx", "complete_tx", "relaxed", "cta", "cluster", "shared",
                            "shared::cta", "shared::cluster", "b64"});
  }
  op.handler = what == "init" ? initialise : what == "inval" ? invalidate : nullptr;
  return op.handler != nullptr &&
         has_no_other(s, {"init", "inval", "shared", "shared::cta", "b64"});
}

}  // namespace ptx_machine
