// wgmma: multiplication by four warps, asynchronously. What is checked:
//  * registers of products in flight are not touched by other instructions
//  * wgmma.fence stands before the first product, and between an access to a register by another
//    instruction and a product with it
//  * the four warps of a warpgroup execute the same statements with the same descriptors
#include "wgmma.h"

#include <algorithm>
#include <span>

#include "races.h"

namespace ptx_machine {
namespace {

constexpr Mask kWhole = ~Mask{0};
constexpr int kWarps = 4;  // of a warpgroup

bool is_whole(Context& c, const Op& op, Mask mask) {
  if (mask == kWhole) return true;
  if ((c.warp->alive & ~mask) == 0) {
    c.fail(op, std::countr_zero(mask), "not all lanes of the warp take part");
  }
  return false;
}

std::string name_of(const Context& c, const Value& v) {
  return c.program.kernel->registers[v.index].name;
}

std::string describe(const Context& c, const Op& op) {
  return c.program.module->describe(*c.program.kernel, *op.statement);
}

// -- warpgroups --------------------------------------------------------------------------------------

WarpMatrices& matrices_of(Context& c) {
  Warp& warp = *c.warp;
  if (warp.matrices == nullptr) {
    warp.matrices = std::make_shared<WarpMatrices>();
    warp.matrices->registers.resize(warp.registers.size());
    const Dim& b = warp.block->index;
    std::seed_seq seed{static_cast<std::uint64_t>(warp.index), std::uint64_t{b.x},
                       std::uint64_t{b.y}, std::uint64_t{b.z}, c.launch.seed};
    if (c.launch.seed != 0) warp.matrices->random = std::mt19937_64(seed)() | 1;
  }
  return *warp.matrices;
}

// Notes that a warp executes a statement. Fails if another warp of the warpgroup had another one
// in its place, or has ended.
void log_statement(Context& c, const Op& op, const Product& product) {
  Block& block = *c.warp->block;
  if (block.warpgroups == nullptr) {
    block.warpgroups = std::make_shared<std::vector<WarpgroupLog>>((block.warps.size() + 3) / 4);
  }
  const int group = c.warp->index / kWarps;
  WarpgroupLog& log = (*block.warpgroups)[group];
  if (block.warps.size() < static_cast<std::size_t>(group + 1) * kWarps) {
    c.fail(op, 0,
           "the block has no four warps from warp " + std::to_string(group * kWarps) + " on");
  }
  const std::uint64_t number = matrices_of(c).statements++;
  if (number - log.begin == log.entries.size()) {
    for (int i = 0; i < kWarps; ++i) {
      const Warp& other = block.warps[group * kWarps + i];
      if (other.groups.empty()) {
        c.fail(op, 0,
               "warp " + std::to_string(other.index) +
                   " of the warpgroup has ended without this statement");
      }
    }
    log.entries.push_back({&op, product.a, product.b, product.adds, c.warp->index, 0});
  }
  WarpgroupLog::Entry& entry = log.entries[number - log.begin];
  const std::string other = "warp " + std::to_string(entry.first_warp) + " of the warpgroup ";
  if (entry.op != &op) c.fail(op, 0, other + "executed instead: " + describe(c, *entry.op));
  if (entry.a != product.a || entry.b != product.b) c.fail(op, 0, other + "had other descriptors");
  if (entry.adds != product.adds) c.fail(op, 0, other + "had another value of scale-d");
  ++entry.warps;
  while (!log.entries.empty() && log.entries.front().warps == kWarps) {
    log.entries.pop_front();
    ++log.begin;
  }
}

// -- registers -------------------------------------------------------------------------------------

// Fails if a register is in use by a product that the warp has not waited for.
void check_idle(const Context& c, const Op& op, const WarpMatrices& m, const Value& v) {
  const RegisterUse& use = m.registers[v.index];
  const bool accumulates = use.accumulates > m.waited_for;
  if (!accumulates && use.is_read <= m.waited_for) return;
  c.fail(op, "register " + name_of(c, v) +
                 (accumulates ? " is an accumulator" : " is a part of A") +
                 " of a product that has not been waited for (" + describe(c, *use.by) + ")");
}

void check_fenced(const Context& c, const Op& op, const WarpMatrices& m, const Value& v) {
  if (m.registers[v.index].epoch != m.epoch) return;
  c.fail(op, "register " + name_of(c, v) +
                 " was accessed by another instruction since the last wgmma.fence");
}

// D may be that of a product in flight, if that has the same shape, or a fence lies between.
void check_accumulator(const Context& c, const Op& op, const WarpMatrices& m, const Value& v) {
  check_fenced(c, op, m, v);
  const RegisterUse& use = m.registers[v.index];
  if (use.is_read > m.waited_for) check_idle(c, op, m, v);
  if (use.accumulates <= m.waited_for || use.epoch_of_d != m.epoch) return;
  const MatrixOp &before = *use.by->matrix, &now = *op.matrix;
  if (before.n == now.n && before.k == now.k && before.d == now.d) return;
  c.fail(op,
         "register " + name_of(c, v) +
             " is an accumulator of a product of another shape, without a wgmma.fence between (" +
             describe(c, *use.by) + ")");
}

// -- statements --------------------------------------------------------------------------------------

void perform_oldest(Context& c, WarpMatrices& m) {
  perform(c, m.left.front());
  m.performed = m.left.front().number;
  m.left.pop_front();
}

std::uint64_t uniform(Context& c, const Op& op, int number) {
  const Lanes& lanes = read(c, op, number, kWhole);
  for (int lane = 1; lane < kLanes; ++lane) {
    if (lanes[lane] != lanes[0]) c.fail(op, lane, "lanes of the warp have different descriptors");
  }
  return lanes[0];
}

bool adds(Context& c, const Op& op, const Value& scale) {
  if (scale.kind == Value::Kind::kConstant) return (*scale.constant)[0] != 0;
  const Mask bits = read_predicate(c, op, scale, kWhole);
  if (bits != 0 && bits != kWhole) {
    c.fail(op, std::countr_one(bits), "lanes of the warp have different values of scale-d");
  }
  return bits != 0;
}

Outcome multiply(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  const MatrixOp& matrix = *op.matrix;
  Product product{&op};
  const int b = matrix.from_registers ? 4 : 1;  // position of B's descriptor
  if (!matrix.from_registers) product.a = uniform(c, op, 0);
  product.b = uniform(c, op, b);
  product.adds = adds(c, op, op.values[b + 1]);
  log_statement(c, op, product);
  WarpMatrices& m = matrices_of(c);
  if (m.epoch == 0) c.fail(op, "there is no wgmma.fence before the first product");
  product.number = ++m.executed;
  for (int i = 0; matrix.from_registers && i < 4; ++i) {
    read(c, op, i, kWhole);  // fails if it was never written
    const Value& v = op.values[i];
    check_fenced(c, op, m, v);
    // The ISA allows a fence here; but an accumulator in flight has no value yet.
    if (m.registers[v.index].accumulates > m.waited_for) check_idle(c, op, m, v);
    m.registers[v.index].is_read = product.number;
    m.registers[v.index].by = &op;
  }
  for (const Value& v : op.targets) {
    check_accumulator(c, op, m, v);
    Mask& written = c.warp->written[v.index];
    if (product.adds && written != kWhole) {
      c.fail(op, std::countr_one(written),
             "register " + name_of(c, v) + " is read but was never written");
    }
    written = kWhole;
    RegisterUse& use = m.registers[v.index];
    use.accumulates = product.number;
    use.epoch_of_d = m.epoch;
    use.by = &op;
  }
  note_operands(c, product);
  m.left.push_back(product);
  return Outcome::kNext;
}

Outcome fence(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  log_statement(c, op, {});
  ++matrices_of(c).epoch;
  return Outcome::kNext;
}

Outcome commit(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  log_statement(c, op, {});
  WarpMatrices& m = matrices_of(c);
  m.groups.push_back(m.executed);
  return Outcome::kNext;
}

// The warps of the calling warp's warpgroup.
std::span<Warp> warpgroup_of(const Context& c) {
  const std::size_t first = c.warp->index / kWarps * kWarps;
  std::vector<Warp>& warps = c.warp->block->warps;
  return std::span(warps).subspan(first, std::min<std::size_t>(kWarps, warps.size() - first));
}

// Performs the products up to a number, of all warps of the warpgroup: one of them may tell others
// then that shared memory is free. Returns false if some warp has not executed them yet.
bool perform_up_to(Context& c, std::uint64_t number) {
  const std::span<Warp> warps = warpgroup_of(c);
  const auto is_behind = [number](const Warp& warp) {
    return warp.matrices == nullptr || warp.matrices->executed < number;
  };
  if (std::any_of(warps.begin(), warps.end(), is_behind)) return false;
  Warp* const caller = c.warp;
  for (Warp& warp : warps) {
    c.warp = &warp;
    WarpMatrices& m = *warp.matrices;
    while (!m.left.empty() && m.left.front().number <= number) perform_oldest(c, m);
  }
  c.warp = caller;
  await_products(c, number);
  return true;
}

Outcome await_groups(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  WarpMatrices& m = matrices_of(c);
  const std::uint64_t most = read(c, op, 0, mask)[0];
  if (m.groups.size() > most) {
    const std::uint64_t last = *(m.groups.end() - static_cast<std::ptrdiff_t>(most) - 1);
    if (!perform_up_to(c, last)) return Outcome::kWait;
    m.waited_for = last;
    m.groups.erase(m.groups.begin(), m.groups.end() - static_cast<std::ptrdiff_t>(most));
  }
  log_statement(c, op, {});
  return Outcome::kNext;
}

// -- decoding ----------------------------------------------------------------------------------------

// Whether an operand is one of two integers; `second` then says which.
bool is_one_of(const Operand& o, int first_choice, int second_choice, bool& second) {
  if (o.kind != Operand::Kind::kNumber || o.is_float || o.is_double) return false;
  second = o.number == second_choice;
  return second || o.number == first_choice;
}

bool read_shape(const std::string& name, MatrixOp& m) {
  if (!name.starts_with("m64n")) return false;
  const auto at = name.find('k');
  if (at == std::string::npos || at == 4 || at + 1 == name.size()) return false;
  if (name.find_first_not_of("0123456789", 4) != at) return false;
  if (name.find_first_not_of("0123456789", at + 1) != std::string::npos || name.size() > 10) {
    return false;
  }
  m.n = std::stoi(name.substr(4, at - 4));
  m.k = std::stoi(name.substr(at + 1));
  return m.n >= 8 && m.n <= 256 && m.n % 8 == 0;
}

bool is_known(const MatrixOp& m) {
  const auto is_8_bit = [](Format f) { return f == Format::kE4m3 || f == Format::kE5m2; };
  const auto is_byte = [](Format f) { return f == Format::kS8 || f == Format::kU8; };
  if (m.k * bytes_of(m.a) != 32) return false;
  if (m.d == Type::kS32) {
    const bool has_size = m.n <= 32 || m.n % 16 == 0;
    return is_byte(m.a) && is_byte(m.b) && has_size;
  }
  if (m.saturates || (m.d != Type::kF32 && m.d != Type::kF16)) return false;
  if (is_8_bit(m.a)) return is_8_bit(m.b);
  if (m.a != m.b) return false;
  return m.a == Format::kF16 ||
         (m.d == Type::kF32 && (m.a == Format::kBf16 || m.a == Format::kTf32));
}

// wgmma.mma_async.sync.aligned.shape{.satfinite}.dtype.atype.btype
//     d, a, b, scale-d{, imm-scale-a, imm-scale-b{, {imm-trans-a, } imm-trans-b}}
bool decode_product(const Statement& s, Op& op, MatrixOp& m) {
  const std::vector<std::string>& names = s.opcode;
  if (names.size() < 8 || names[2] != "sync" || names[3] != "aligned") return false;
  if (!read_shape(names[4], m)) return false;
  m.saturates = names[5] == "satfinite";
  const std::size_t at = m.saturates ? 6 : 5;
  if (names.size() != at + 3) return false;
  m.d = type_of(names[at]);
  m.a = format_of(names[at + 1]);
  m.b = format_of(names[at + 2]);
  if (m.a == Format::kNone || m.b == Format::kNone || !is_known(m)) return false;
  if (s.operands.size() < 4 || s.operands[0].kind != Operand::Kind::kList) return false;
  const std::size_t registers = m.d == Type::kF16 ? m.n / 4 : m.n / 2;
  if (s.operands[0].parts.size() != registers) return false;
  m.from_registers = s.operands[1].kind == Operand::Kind::kList;
  if (m.from_registers && s.operands[1].parts.size() != 4) return false;
  bool negates_a = false, negates_b = false;
  std::size_t used = 4;
  if (m.d != Type::kS32) {
    if (s.operands.size() < 6) return false;
    if (!is_one_of(s.operands[4], 1, -1, negates_a)) return false;
    if (!is_one_of(s.operands[5], 1, -1, negates_b)) return false;
    used = 6;
  }
  if (bytes_of(m.a) == 2) {
    if (s.operands.size() != (m.from_registers ? 7u : 8u)) return false;
    if (!m.from_registers && !is_one_of(s.operands[used++], 0, 1, m.is_m_major)) return false;
    if (!is_one_of(s.operands[used++], 0, 1, m.is_n_major)) return false;
  }
  m.negates = negates_a != negates_b;
  op.handler = multiply;
  return used == s.operands.size();
}

}  // namespace

bool decode_wgmma(const Statement& s, Op& op) {
  if (s.opcode[0] != "wgmma" || s.opcode.size() < 4) return false;
  MatrixOp m;
  if (s.opcode[1] == "mma_async") {
    if (!decode_product(s, op, m)) return false;
  } else {
    if (s.opcode.size() != 4 || s.opcode[2] != "sync" || s.opcode[3] != "aligned") return false;
    op.written = 0;
    op.handler = s.opcode[1] == "fence"          ? fence
                 : s.opcode[1] == "commit_group" ? commit
                 : s.opcode[1] == "wait_group"   ? await_groups
                                                 : nullptr;
  }
  op.matrix = std::make_shared<const MatrixOp>(m);
  return op.handler != nullptr;
}

void check_matrix_registers(Context& c, const Op& op) {
  WarpMatrices& m = *c.warp->matrices;
  if (m.random != 0 && !m.left.empty()) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 7;
    m.random ^= m.random << 17;
    if (m.random % 16 == 0) perform_oldest(c, m);
  }
  if (op.matrix != nullptr) return;
  const auto access = [&](const Value& v) {
    if (v.kind != Value::Kind::kRegister) return;
    check_idle(c, op, m, v);
    m.registers[v.index].epoch = m.epoch;
  };
  for (const Value& v : op.targets) access(v);
  for (const Value& v : op.values) access(v);
}

void leave_warpgroup(Context& c, const Warp& warp) {
  const WarpgroupLog& log = (*warp.block->warpgroups)[warp.index / kWarps];
  const std::uint64_t executed = warp.matrices == nullptr ? 0 : warp.matrices->statements;
  if (executed - log.begin >= log.entries.size()) return;
  const WarpgroupLog::Entry& entry = log.entries[executed - log.begin];
  c.fail(*entry.op, "warp " + std::to_string(warp.index) +
                        " has ended without this statement, which warp " +
                        std::to_string(entry.first_warp) + " of its warpgroup executed");
}

}  // namespace ptx_machine
