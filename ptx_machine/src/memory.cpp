// Loads, stores, atomics and asynchronous copies.
//
// Values of up to eight bytes are loaded and stored as a whole, so that machines in several
// processes can share memory.
#include <algorithm>
#include <array>
#include <atomic>

#include "machine.h"
#include "races.h"
#include "reduction.h"

namespace ptx_machine {
namespace {

// Fails if [address, address + bytes) is not inside of one allocation.
void check_global(const Context& c, const Op& op, int lane, std::uint64_t address,
                  std::uint64_t bytes) {
  const std::string problem = outside_global(*c.memory, address, bytes);
  if (!problem.empty()) c.fail(op, lane, problem);
}

}  // namespace

std::string outside_global(const Allocations& memory, std::uint64_t address, std::uint64_t bytes) {
  auto next = memory.upper_bound(address);
  std::string near;
  if (next == memory.begin()) {
    near = "no allocation lies before it";
  } else {
    const auto& [begin, allocation] = *--next;
    if (allocation.is_freed && address < allocation.end) {
      return "use after free: access of " + std::to_string(bytes) + " bytes, " +
             std::to_string(address - begin) + " bytes behind the start of " + allocation.name +
             ", which was freed";
    }
    if (address + bytes <= allocation.end) {
      return allocation.members.empty() ? ""
                                        : "a multicast address, which only multimem may access";
    }
    near = std::to_string(address - begin) + " bytes behind the start of " + allocation.name +
           ", which has " + std::to_string(allocation.end - begin);
  }
  return "access of " + std::to_string(bytes) + " bytes outside of global memory: " + near;
}

std::vector<std::uint64_t> places_of(const Allocations& memory, std::uint64_t address) {
  auto next = memory.upper_bound(address);
  if (next == memory.begin() || (--next)->second.members.empty()) return {address};
  std::vector<std::uint64_t> places;
  for (const std::uint64_t member : next->second.members) {
    places.push_back(member + (address - next->first));
  }
  return places;
}

std::uint8_t* at(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                 std::uint64_t bytes) {
  if (address % bytes != 0) {
    c.fail(op, lane,
           "address " + std::to_string(address) + " is not aligned to " + std::to_string(bytes) +
               " bytes");
  }
  const auto inside = [&](std::uint8_t* memory, std::uint64_t offset, std::uint64_t size,
                          const char* what) {
    if (offset <= size && bytes <= size - offset) return memory + offset;
    c.fail(op, lane,
           "access of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " of " +
               what + ", which has " + std::to_string(size));
  };
  const bool generic = space == Space::kGeneric && address >= kSharedWindow;
  if (generic || space == Space::kShared || space == Space::kCluster) {
    Place place{c.warp->block, address & 0xFFFFFFFF};
    if (place.offset > kOffsetMask) place = shared_place(c, op, lane, space, address);
    std::vector<std::uint8_t>& shared = place.block->shared;
    return inside(shared.data(), place.offset, shared.size(), "shared memory");
  }
  if (address >= kLocalWindow) {
    const std::uint64_t size = c.program.kernel->local_bytes;
    return inside(c.warp->local.data() + size * lane, address - kLocalWindow, size, "local memory");
  }
  if (address >= kParamWindow) {
    auto& params = const_cast<std::vector<std::uint8_t>&>(c.launch.params);
    return inside(params.data(), address - kParamWindow, params.size(), "the parameters");
  }
  check_global(c, op, lane, address, bytes);
  return reinterpret_cast<std::uint8_t*>(address);
}

namespace {

template <class T>
std::uint64_t load_whole(std::uint8_t* from) {
  return bits_of(std::atomic_ref<T>(*reinterpret_cast<T*>(from)).load(std::memory_order_acquire));
}
template <class T>
void store_whole(std::uint8_t* to, std::uint64_t bits) {
  std::atomic_ref<T>(*reinterpret_cast<T*>(to)).store(get<T>(bits), std::memory_order_release);
}

std::uint64_t load_bytes(std::uint8_t* from, int bytes) {
  switch (bytes) {
    case 1:
      return load_whole<std::uint8_t>(from);
    case 2:
      return load_whole<std::uint16_t>(from);
    case 4:
      return load_whole<std::uint32_t>(from);
    default:
      return load_whole<std::uint64_t>(from);
  }
}
void store_bytes(std::uint8_t* to, std::uint64_t bits, int bytes) {
  switch (bytes) {
    case 1:
      return store_whole<std::uint8_t>(to, bits);
    case 2:
      return store_whole<std::uint16_t>(to, bits);
    case 4:
      return store_whole<std::uint32_t>(to, bits);
    default:
      return store_whole<std::uint64_t>(to, bits);
  }
}

// Extends a loaded value to its register: with its sign, if it has one.
std::uint64_t extended(Context& c, const Value& target, std::uint64_t bits, Type type) {
  if (!is_signed(type) || target.kind != Value::Kind::kRegister) return bits;
  const int bytes = bytes_of(c.program.kernel->registers[target.index].type);
  return cut(static_cast<std::uint64_t>(integer(bits, type)), bytes);
}

// Keeps others from accessing elements of a vector meanwhile, if vectors are whole.
std::unique_lock<std::mutex> hold_vector(Context& c, const Op& op, int count) {
  const bool whole =
      op.order.strong && count > 1 && (op.whole || c.launch.vectors == Vectors::kWhole);
  return whole ? c.races->hold_vector() : std::unique_lock<std::mutex>();
}

Outcome load(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);  // a copy: the target may be the base
  const int bytes = bytes_of(op.type), count = static_cast<int>(op.targets.size());
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t* from = at(c, op, l, op.space, address, bytes * count);
    const auto whole = hold_vector(c, op, count);
    std::uint64_t vector = 0;
    const bool nothing =
        !op.order.strong && note_read(c, op, l, op.space, address, bytes * count, op.flag);
    for (int i = 0; i < count; ++i) {
      std::uint64_t bits = 0;
      if (op.order.strong) {
        StrongAccess access(c, op, l, op.space, address + i * bytes, bytes, Use::kRead);
        bits = load_bytes(from + i * bytes, bytes);
        bits = access.loaded(bits);
        if (i == 0) vector = access.vector();
        if (access.vector() != vector && !op.whole && c.launch.vectors == Vectors::kReported) {
          c.fail(
              op, l,
              "a load mixes elements of two stores: PTX takes the elements of a vector as accesses "
              "of their own (vectors=\"whole\" takes them as one)");
        }
      } else {
        bits = load_bytes(from + i * bytes, bytes);
      }
      write(c, op, i, Mask{1} << l)[l] = extended(c, op.targets[i], bits, op.type);
      if (nothing) unwrite(c, op, i, Mask{1} << l);
    }
  });
  return Outcome::kNext;
}

Outcome store(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type), count = static_cast<int>(op.values.size()) - 1;
  c.unchanged = true;
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t* to = at(c, op, l, op.space, address, bytes * count);
    const auto whole = hold_vector(c, op, count);
    c.vector = op.order.strong && count > 1 ? c.races->new_vector() : 0;
    for (int i = 0; i < count; ++i) {
      const std::uint64_t bits = cut(read(c, op, 1 + i, Mask{1} << l)[l], bytes);
      if (op.order.strong) {
        StrongAccess access(c, op, l, op.space, address + i * bytes, bytes, Use::kWrite);
        const std::uint64_t before = load_bytes(to + i * bytes, bytes);
        c.unchanged = c.unchanged && before == bits;
        access.settle(before);
        store_bytes(to + i * bytes, bits, bytes);
        access.stored(bits);
      } else {
        const bool same = load_bytes(to + i * bytes, bytes) == bits;
        c.unchanged = c.unchanged && same;
        note_write(c, op, l, op.space, address + i * bytes, bytes, same);
        store_bytes(to + i * bytes, bits, bytes);
      }
    }
  });
  return Outcome::kNext;
}

template <class T>
Outcome atomic(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask), by = read(c, op, 1, mask);
  const bool swaps = op.values.size() > 2;
  const Lanes with = swaps ? read(c, op, 2, mask) : Lanes{};
  c.unchanged = true;
  c.vector = 0;
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t* where = at(c, op, l, op.space, address, sizeof(T));
    StrongAccess access(c, op, l, op.space, address, sizeof(T), Use::kAtomic);
    std::atomic_ref<T> cell(*reinterpret_cast<T*>(where));
    T old = cell.load(), next = old;
    do {
      next = changed<T>(static_cast<Action>(op.number), old, get<T>(by[l]), get<T>(with[l]));
    } while (!cell.compare_exchange_weak(old, next));
    c.unchanged = c.unchanged && bits_of(old) == bits_of(next);
    access.loaded(bits_of(old));
    access.stored(bits_of(next));
    if (!op.targets.empty()) write(c, op, 0, Mask{1} << l)[l] = bits_of(old);
  });
  return Outcome::kNext;
}

// atom.exch and atom.cas of .b128. Other accesses of .b128 by kernels of this process do not come between.
Outcome atomic_pair(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const bool compares = op.number == kSwapIf;
  c.unchanged = true;
  c.vector = 0;
  each(mask, [&](int l) {
    const Mask lane = Mask{1} << l;
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t* where = at(c, op, l, op.space, address, 16);
    const auto whole = c.races->hold_vector();
    const std::array<std::uint64_t, 2> old = {load_bytes(where, 8), load_bytes(where + 8, 8)};
    const bool swaps =
        !compares || (old[0] == read(c, op, 1, lane)[l] && old[1] == read(c, op, 2, lane)[l]);
    for (int i = 0; i < 2; ++i) {
      const std::uint64_t next = swaps ? read(c, op, (compares ? 3 : 1) + i, lane)[l] : old[i];
      StrongAccess access(c, op, l, op.space, address + 8 * i, 8, Use::kAtomic);
      access.loaded(old[i]);
      store_bytes(where + 8 * i, next, 8);
      access.stored(next);
      c.unchanged = c.unchanged && next == old[i];
      write(c, op, i, lane)[l] = old[i];
    }
  });
  return Outcome::kNext;
}

Handler atomic_of(Type type) {
  switch (type) {
    case Type::kB32:
    case Type::kU32:
      return atomic<std::uint32_t>;
    case Type::kB64:
    case Type::kU64:
      return atomic<std::uint64_t>;
    case Type::kS32:
      return atomic<std::int32_t>;
    case Type::kS64:
      return atomic<std::int64_t>;
    case Type::kF32:
      return atomic<float>;
    case Type::kF64:
      return atomic<double>;
    default:
      return nullptr;
  }
}

bool decode_atomic(const Statement& s, Op& op) {
  op.number = action_of(s);
  if (op.number < 0 || has(s, "async") || has(s, "v2") || has(s, "v4")) return false;
  if (op.type == Type::kB128) {
    op.whole = true;
    op.handler = atomic_pair;
    const bool compares = op.number == kSwapIf;
    if (s.opcode[0] != "atom" || s.operands.size() != (compares ? 4u : 3u)) return false;
    return (compares ? is_pair(s.operands[3]) : op.number == kExchange) && is_pair(s.operands[0]) &&
           is_pair(s.operands[2]);
  }
  const bool real = is_float(op.type);
  if (real && op.number != kAdd) return false;
  op.handler = atomic_of(op.type);
  op.written = s.opcode[0] == "atom" ? 1 : 0;
  return op.handler != nullptr;
}

// -- cp.async: performed as late as it may be, when a thread waits for it -------------------------------

Outcome copy(Context& c, const Op& op, Mask mask) {
  const Lanes target = read(c, op, 0, mask), source = read(c, op, 1, mask);
  const Lanes bytes = read(c, op, 2, mask);
  const bool partial = op.values.size() > 3;
  const Lanes filled = partial ? read(c, op, 3, mask) : bytes;
  each(mask, [&](int l) {
    const Copy one{address_of(op, 0, target, l), address_of(op, 1, source, l),
                   static_cast<std::uint32_t>(bytes[l]), static_cast<std::uint32_t>(filled[l]),
                   c.warp->copies_started[l]++};
    at(c, op, l, Space::kShared, one.target, one.bytes);
    if (one.filled != 0) at(c, op, l, Space::kGlobal, one.source, one.bytes);
    note_copy(c, op, l, one.target, one.bytes, one.source, std::min(one.filled, one.bytes));
    c.warp->copies[l].push_back(one);
    c.bytes += one.bytes;
  });
  return Outcome::kNext;
}

Outcome commit(Context& c, const Op&, Mask mask) {
  each(mask, [&](int l) {
    c.warp->copy_groups[l].push_back(std::move(c.warp->copies[l]));
    c.warp->copies[l].clear();
    commit_copies(c, l);
  });
  return Outcome::kNext;
}

void perform(const Context& c, Block& block, const Copy& one) {
  if (one.filled != 0) {
    const std::string problem = outside_global(*c.memory, one.source, one.bytes);
    if (!problem.empty()) throw PtxError("cp.async: " + problem);
  }
  std::uint8_t* to = block.shared.data() + (one.target & kOffsetMask);
  std::memset(to, 0, one.bytes);
  if (one.filled != 0) {
    std::memcpy(to, reinterpret_cast<const void*>(one.source), std::min(one.filled, one.bytes));
  }
}

void perform(Context& c, const std::vector<Copy>& copies) {
  for (const Copy& one : copies) perform(c, *c.warp->block, one);
}

Outcome await_copies(Context& c, const Op& op, Mask mask) {
  const std::uint64_t left = op.flag ? 0 : read(c, op, 0, mask)[std::countr_zero(mask)];
  each(mask, [&](int l) {
    auto& groups = c.warp->copy_groups[l];
    for (; groups.size() > left; groups.pop_front()) perform(c, groups.front());
    if (op.flag) {
      perform(c, c.warp->copies[l]);
      c.warp->copies[l].clear();
    }
    await_copies_of(c, l, left, op.flag);
  });
  return Outcome::kNext;
}

bool decode_copy(const Statement& s, Op& op) {
  if (s.opcode.size() < 3 || s.opcode[1] != "async" || has(s, "bulk") || has(s, "mbarrier")) {
    return false;
  }
  op.written = 0;
  op.flag = has(s, "wait_all");
  op.handler = has(s, "commit_group")                      ? commit
               : op.flag || has(s, "wait_group")           ? await_copies
               : has(s, "shared") || has(s, "shared::cta") ? copy
                                                           : nullptr;
  return op.handler != nullptr;
}

}  // namespace

void perform_copies(const Context& c, Warp& warp, int lane, std::uint64_t before) {
  const auto some = [&](std::vector<Copy>& copies) {
    std::erase_if(copies, [&](const Copy& one) {
      if (one.number >= before) return false;
      perform(c, *warp.block, one);
      return true;
    });
  };
  for (std::vector<Copy>& copies : warp.copy_groups[lane]) some(copies);
  some(warp.copies[lane]);
}

bool decode_memory(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "st" && has(s, "async")) return false;
  op.space = space_of(s);
  op.order = memory_order_of(s);
  if (name == "cp") return decode_copy(s, op);
  if (name == "atom" || name == "red") return decode_atomic(s, op);
  if (name == "ld" || name == "ldu") {
    op.handler = load;
    op.flag = has(s, "nc");
  }
  if (name == "st") {
    op.handler = store;
    op.written = 0;
  }
  if (op.type == Type::kB128) {
    const std::size_t value = name == "st" ? 1 : 0;
    if (s.operands.size() < 2 || !is_pair(s.operands[value]) || has(s, "v2") || has(s, "v4")) {
      return false;
    }
    op.type = Type::kB64;
    op.whole = true;
  }
  return op.handler != nullptr && op.type != Type::kNone;
}

}  // namespace ptx_machine
