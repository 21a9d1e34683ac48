#include "uncommon.h"

#include <atomic>
#include <optional>

#include "races.h"
#include "reduction.h"

namespace ptx_machine {
namespace {

Outcome nothing_to_do(Context&, const Op&, Mask) { return Outcome::kNext; }

Outcome break_here(Context& c, const Op& op, Mask mask) {
  c.fail(op, std::countr_zero(mask), "a breakpoint, which ends a kernel without a debugger");
}

// A policy is opaque: accesses take it and do nothing with it.
Outcome make_policy(Context& c, const Op& op, Mask mask) {
  constexpr std::uint64_t kPolicy = 0x14F0000000000000;
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = kPolicy; });
  return Outcome::kNext;
}

// discard (op.flag): whatever was there is lost. applypriority: a hint.
Outcome hint_line(Context& c, const Op& op, Mask mask) {
  constexpr std::uint64_t kLine = 128;
  const Lanes base = read(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t* line = at(c, op, l, op.space, address, kLine);
    if (!op.flag) return;
    note_write(c, op, l, op.space, address, kLine);
    std::memset(line, 0xCD, kLine);
  });
  return Outcome::kNext;
}

// -- reductions of vectors, and of pairs of halves -----------------------------------------------------

std::uint64_t bits_at(const std::uint8_t* from, int bytes) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, from, static_cast<std::size_t>(bytes));
  return bits;
}

// red and atom, an element at a time: of pairs of halves each half.
Outcome reduce_elements(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const bool pair = op.type == Type::kF16x2 || op.type == Type::kBf16x2;
  const bool bf16 = op.type == Type::kBf16x2 || op.type == Type::kBf16;
  const int width = bytes_of(op.type), parts = pair ? 2 : 1;
  const Type half = bf16 ? Type::kBf16 : Type::kF16;
  const Reducer reduce = reducer_of(static_cast<Action>(op.number), pair ? half : op.type);
  c.vector = 0;
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    const auto count = static_cast<std::uint64_t>(op.position);
    std::uint8_t* where = at(c, op, l, op.space, address, width * count);
    for (int i = 0; i < op.position; ++i) {
      const std::uint64_t by = read(c, op, 1 + i, Mask{1} << l)[l];
      std::uint8_t* element = where + i * width;
      StrongAccess access(c, op, l, op.space, address + i * width, width, Use::kAtomic);
      const std::uint64_t old = bits_at(element, width);
      for (int part = 0; part < parts; ++part) {
        const int at_part = part * (width / parts);
        const std::uint64_t operand = by >> (8 * at_part);
        reduce(element + at_part, reinterpret_cast<const std::uint8_t*>(&operand));
      }
      access.loaded(old);
      access.stored(bits_at(element, width));
      if (!op.targets.empty()) write(c, op, i, Mask{1} << l)[l] = old;
    }
  });
  return Outcome::kNext;
}

bool decode_reduction(const Statement& s, Op& op) {
  const bool half = op.type == Type::kF16 || op.type == Type::kBf16;
  const bool pair = op.type == Type::kF16x2 || op.type == Type::kBf16x2;
  const bool vector = has(s, "v2") || has(s, "v4") || has(s, "v8");
  if (!half && !pair && !(op.type == Type::kF32 && vector)) return false;
  op.number = action_of(s);
  op.position = has(s, "v2") ? 2 : has(s, "v4") ? 4 : has(s, "v8") ? 8 : 1;
  op.space = space_of(s);
  op.order = memory_order_of(s);
  op.order.strong = true;
  op.written = s.opcode[0] == "atom" ? 1 : 0;
  op.handler = reduce_elements;
  const bool extreme = op.number == kMin || op.number == kMax;
  if (op.number != kAdd && !(extreme && !(op.type == Type::kF32))) return false;
  if (has(s, "v8") && !half) return false;
  return has_only(s,
                  " add min max noftz global shared shared::cta shared::cluster relaxed acquire "
                  "release acq_rel cta cluster gpu sys v2 v4 v8 L2::cache_hint ");
}

// -- a stack -------------------------------------------------------------------------------------------
//
// Its first word is the offset of what is free, or what memory is filled with: nothing was taken yet.

std::uint64_t stack_of(const Context& c) {
  for (const Variable& v : c.program.kernel->locals) {
    if (v.name == kStack) return kLocalWindow + v.offset;
  }
  return 0;
}

template <class F>
Outcome with_stack(Context& c, const Op& op, Mask mask, F&& f) {
  const std::uint64_t begin = stack_of(c);
  each(mask, [&](int l) {
    std::uint8_t* word = at(c, op, l, Space::kLocal, begin, 8);
    std::uint64_t used = bits_at(word, 8);
    if (used == 0xCDCDCDCDCDCDCDCD) used = 16;
    f(l, begin, used);
    std::memcpy(word, &used, 8);
  });
  return Outcome::kNext;
}

// alloca.type pointer, bytes {, alignment}
Outcome allocate(Context& c, const Op& op, Mask mask) {
  const Lanes sizes = read(c, op, 0, mask);
  const Lanes aligns = op.values.size() > 1 ? read(c, op, 1, mask) : Lanes{};
  Lanes& d = write(c, op, 0, mask);
  return with_stack(c, op, mask, [&](int l, std::uint64_t begin, std::uint64_t& used) {
    const std::uint64_t align = op.values.size() > 1 ? std::max<std::uint64_t>(aligns[l], 1) : 8;
    const std::uint64_t first = (used + align - 1) / align * align;
    if (sizes[l] > kStackBytes || first + sizes[l] > kStackBytes) {
      c.fail(op, l,
             "alloca of " + std::to_string(sizes[l]) + " bytes: the stack of the machine has " +
                 std::to_string(kStackBytes));
    }
    d[l] = begin + first;
    used = first + sizes[l];
  });
}

Outcome save_stack(Context& c, const Op& op, Mask mask) {
  Lanes& d = write(c, op, 0, mask);
  return with_stack(c, op, mask,
                    [&](int l, std::uint64_t begin, std::uint64_t& used) { d[l] = begin + used; });
}

Outcome restore_stack(Context& c, const Op& op, Mask mask) {
  const Lanes to = read(c, op, 0, mask);
  return with_stack(c, op, mask, [&](int l, std::uint64_t begin, std::uint64_t& used) {
    if (to[l] < begin + 16 || to[l] > begin + used) {
      c.fail(op, l, "stackrestore of what stacksave has not returned");
    }
    used = to[l] - begin;
  });
}

}  // namespace

bool decode_uncommon(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "red" || name == "atom") return decode_reduction(s, op);
  if (name == "createpolicy") {
    op.handler = make_policy;
    return s.opcode.size() > 2 && s.opcode.back() == "b64" &&
           (has(s, "fractional") || has(s, "range") || has(s, "cvt"));
  }
  if (name == "alloca" || name == "stacksave") {
    op.handler = name == "alloca" ? allocate : save_stack;
    return s.opcode.size() == 2;
  }
  op.written = 0;
  if (name == "stackrestore") {
    op.handler = restore_stack;
    return s.opcode.size() == 2;
  }
  if (name == "brkpt" || name == "pmevent") {
    op.handler = name == "brkpt" ? break_here : nothing_to_do;
    return true;
  }
  if (name == "discard" || name == "applypriority") {
    op.space = space_of(s);
    op.flag = name == "discard";
    op.handler = hint_line;
    return has_no_other(s, {"global", "L2", "L2::evict_normal"}) && s.operands.size() == 2;
  }
  return false;
}

}  // namespace ptx_machine
