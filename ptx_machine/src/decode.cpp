#include <algorithm>
#include <chrono>
#include <string_view>

#include "machine.h"
#include "uncommon.h"

namespace ptx_machine {
namespace {

std::uint32_t thread(const Context& c, int lane, int axis) {
  const Dim& d = c.launch.block;
  const auto t = static_cast<std::uint32_t>(c.thread_of(lane));
  return axis == 0 ? t % d.x : axis == 1 ? t / d.x % d.y : t / d.x / d.y;
}

// A block's place in its cluster. Clusters are blocks next to each other, so %ctaid stays what it is.
Dim in_cluster(const Context& c) {
  const Dim& i = c.warp->block->index;
  return {i.x % c.cluster.x, i.y % c.cluster.y, i.z % c.cluster.z};
}

template <class F>
void all(Lanes& out, F&& f) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = f(lane);
}

struct SpecialRow {
  const char* name;
  void (*read)(const Context&, Lanes&);
};

constexpr SpecialRow kSpecials[] = {
    {"%tid.x", [](const Context& c, Lanes& o) { all(o, [&](int l) { return thread(c, l, 0); }); }},
    {"%tid.y", [](const Context& c, Lanes& o) { all(o, [&](int l) { return thread(c, l, 1); }); }},
    {"%tid.z", [](const Context& c, Lanes& o) { all(o, [&](int l) { return thread(c, l, 2); }); }},
    {"%ntid.x", [](const Context& c, Lanes& o) { o.fill(c.launch.block.x); }},
    {"%ntid.y", [](const Context& c, Lanes& o) { o.fill(c.launch.block.y); }},
    {"%ntid.z", [](const Context& c, Lanes& o) { o.fill(c.launch.block.z); }},
    {"%ctaid.x", [](const Context& c, Lanes& o) { o.fill(c.warp->block->index.x); }},
    {"%ctaid.y", [](const Context& c, Lanes& o) { o.fill(c.warp->block->index.y); }},
    {"%ctaid.z", [](const Context& c, Lanes& o) { o.fill(c.warp->block->index.z); }},
    {"%nctaid.x", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.x); }},
    {"%nctaid.y", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.y); }},
    {"%nctaid.z", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.z); }},
    {"%clusterid.x", [](const Context& c, Lanes& o) { o.fill(c.warp->block->cluster->index.x); }},
    {"%clusterid.y", [](const Context& c, Lanes& o) { o.fill(c.warp->block->cluster->index.y); }},
    {"%clusterid.z", [](const Context& c, Lanes& o) { o.fill(c.warp->block->cluster->index.z); }},
    {"%nclusterid.x", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.x / c.cluster.x); }},
    {"%nclusterid.y", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.y / c.cluster.y); }},
    {"%nclusterid.z", [](const Context& c, Lanes& o) { o.fill(c.launch.grid.z / c.cluster.z); }},
    {"%cluster_ctaid.x", [](const Context& c, Lanes& o) { o.fill(in_cluster(c).x); }},
    {"%cluster_ctaid.y", [](const Context& c, Lanes& o) { o.fill(in_cluster(c).y); }},
    {"%cluster_ctaid.z", [](const Context& c, Lanes& o) { o.fill(in_cluster(c).z); }},
    {"%cluster_nctaid.x", [](const Context& c, Lanes& o) { o.fill(c.cluster.x); }},
    {"%cluster_nctaid.y", [](const Context& c, Lanes& o) { o.fill(c.cluster.y); }},
    {"%cluster_nctaid.z", [](const Context& c, Lanes& o) { o.fill(c.cluster.z); }},
    {"%cluster_ctarank", [](const Context& c, Lanes& o) { o.fill(c.warp->block->rank); }},
    {"%cluster_nctarank", [](const Context& c, Lanes& o) { o.fill(c.cluster.count()); }},
    {"%is_explicit_cluster", [](const Context& c, Lanes& o) { o.fill(c.explicit_cluster); }},
    {"%nsmid", [](const Context& c, Lanes& o) { o.fill(c.multiprocessors); }},
    {"%smid", [](const Context& c, Lanes& o) { o.fill(c.warp->block->multiprocessor); }},
    {"%nwarpid", [](const Context& c, Lanes& o) { o.fill(c.most_warps); }},
    {"%laneid", [](const Context&, Lanes& o) { all(o, [](int l) { return l; }); }},
    {"%warpid", [](const Context& c, Lanes& o) { o.fill(c.warp->index); }},
    {"%lanemask_eq", [](const Context&, Lanes& o) { all(o, [](int l) { return 1u << l; }); }},
    {"%lanemask_lt", [](const Context&, Lanes& o) { all(o, [](int l) { return (1u << l) - 1; }); }},
    {"%lanemask_le", [](const Context&, Lanes& o) { all(o, [](int l) { return (2u << l) - 1; }); }},
    {"%lanemask_gt",
     [](const Context&, Lanes& o) { all(o, [](int l) { return ~((2u << l) - 1); }); }},
    {"%lanemask_ge",
     [](const Context&, Lanes& o) { all(o, [](int l) { return ~((1u << l) - 1); }); }},
    {"%dynamic_smem_size", [](const Context& c, Lanes& o) { o.fill(c.launch.dynamic_shared); }},
    {"%total_smem_size",
     [](const Context& c, Lanes& o) {
       o.fill(c.program.kernel->shared_bytes + c.launch.dynamic_shared);
     }},
    // Where cooperative groups find the workspace of a grid.
    {"%envreg1", [](const Context& c, Lanes& o) { o.fill(c.workspace >> 32); }},
    {"%envreg2", [](const Context& c, Lanes& o) { o.fill(c.workspace & 0xFFFFFFFF); }},
    // Time is the number of statements that were executed.
    {"%clock64", [](const Context& c, Lanes& o) { o.fill(c.statements()); }},
    {"%clock", [](const Context& c, Lanes& o) { o.fill(c.statements() & 0xFFFFFFFF); }},
    {"%clock_hi", [](const Context& c, Lanes& o) { o.fill(c.statements() >> 32); }},
    {"%globaltimer",
     [](const Context& c, Lanes& o) {
       const auto host = [] { return std::chrono::steady_clock::now().time_since_epoch(); };
       o.fill(!c.launch.real_time ? c.statements()
              : c.stopped_at != 0
                  ? c.stopped_at
                  : static_cast<std::uint64_t>(host() / std::chrono::nanoseconds(1)));
     }},
};

// Whether a statement makes registers of registers and does nothing else. Predicates decide.
bool computes(Decoder family, const Statement& s) {
  const std::string& name = s.opcode[0];
  if (name == "setp" || name == "testp" || (name == "lop3" && s.operands[0].second >= 0))
    return false;
  return family == decode_scalar || family == decode_bits || family == decode_float ||
         family == decode_convert;
}

class Decoding {
 public:
  Decoding(const Module& module, const Kernel& kernel,
           const std::map<std::string, std::uint64_t>& addresses)
      : module_(module), kernel_(kernel), addresses_(addresses) {}

  Program run() {
    Program program{&module_, &kernel_, kernel_.shared_bytes, {}, 0, false, false};
    for (const Variable& v : module_.variables) {
      if (v.is_dynamic) program.shared_bytes = std::max(program.shared_bytes, behind_shared(v));
    }
    for (const Statement& s : kernel_.statements) {
      Op op = one(s);
      // Lanes that a statement without a label sends to one stay where they are.
      if (op.label < 0) op.label = static_cast<int>(program.ops.size());
      op.acts = acts(s);
      op.changes = changes(s);
      program.hands_registers |= s.opcode[0] == "setmaxnreg";
      for (const Operand& o : s.operands) program.has_workspace |= o.name.starts_with("%envreg");
      program.ops.push_back(std::move(op));
    }
    program.live = live_registers(program);
    return program;
  }

 private:
  Op one(const Statement& s) {
    Op op;
    for (const Decoder family :
         {decode_scalar, decode_bits, decode_float, decode_convert, decode_memory, decode_cluster,
          decode_mbarrier, decode_bulk, decode_tensor, decode_warp, decode_matrix, decode_wgmma,
          decode_wmma, decode_multimem, decode_call, decode_extended, decode_uncommon,
          decode_products, decode_tensor_map}) {
      op = Op();  // what a family that does not know the statement left there
      op.statement = &s;
      op.type = last_type(s);
      op.propagates = computes(family, s);
      if (family(s, op)) break;
      op.handler = nullptr;
    }
    if (op.handler == nullptr) fail(s, "unknown instruction");
    if (s.guard >= 0) {
      op.guard.kind = Value::Kind::kPredicate;
      op.guard.index = s.guard;
      op.guard.negated = s.guard_negated;
    }
    int number = 0;
    for (const Operand& o : s.operands) {
      if (o.kind == Operand::Kind::kLabel) {
        op.label = o.index;
        continue;
      }
      flatten(s, op, o, number++ < op.written ? op.targets : op.values);
    }
    return op;
  }

  void flatten(const Statement& s, const Op& op, const Operand& o, std::vector<Value>& out) {
    if (o.kind == Operand::Kind::kList) {
      for (const Operand& part : o.parts) flatten(s, op, part, out);
      return;
    }
    out.push_back(value(s, op, o));
    if (o.second >= 0) {
      Value second;
      second.kind = Value::Kind::kPredicate;
      second.index = o.second;
      out.push_back(std::move(second));
    }
    for (const Operand& part : o.parts) flatten(s, op, part, out);
  }

  Value value(const Statement& s, const Op& op, const Operand& o) {
    Value v;
    v.index = o.index;
    v.negated = o.negated;
    switch (o.kind) {
      case Operand::Kind::kRegister:
        v.kind = Value::Kind::kRegister;
        break;
      case Operand::Kind::kPredicate:
        v.kind = Value::Kind::kPredicate;
        break;
      case Operand::Kind::kNumber:
        constant(v, literal(op, o));
        break;
      case Operand::Kind::kSpecial:
        v.kind = Value::Kind::kSpecial;
        for (const SpecialRow& row : kSpecials) {
          if (o.name == row.name) v.special = row.read;
        }
        if (v.special == nullptr) fail(s, "unknown special register " + o.name);
        break;
      case Operand::Kind::kSymbol:
        constant(v, address(s, o.name) + o.number);
        break;
      case Operand::Kind::kAddress:
        if (o.index >= 0) {
          v.kind = Value::Kind::kRegister;
          v.offset = o.number;
        } else {
          constant(v, (o.name.empty() ? 0 : address(s, o.name)) + o.number);
        }
        break;
      default:
        break;
    }
    return v;
  }

  // An integer is as wide as the operation; 0d... in an operation on f32 is rounded to it.
  static std::uint64_t literal(const Op& op, const Operand& o) {
    const auto bits = static_cast<std::uint64_t>(o.number);
    if (o.is_double && op.type == Type::kF32) {
      return bits_of(static_cast<float>(get<double>(bits)));
    }
    if (o.is_float && op.type == Type::kF64) {
      return bits_of(static_cast<double>(get<float>(bits)));
    }
    return bits;
  }

  static void constant(Value& v, std::uint64_t bits) {
    v.kind = Value::Kind::kConstant;
    v.constant = std::make_unique<Lanes>();
    v.constant->fill(bits);
  }

  // Where a dynamic array lies: behind the kernel's own shared memory.
  std::uint64_t behind_shared(const Variable& v) const {
    return (kernel_.shared_bytes + v.align - 1) / v.align * v.align;
  }

  std::uint64_t address(const Statement& s, const std::string& name) const {
    const auto find = [&](const std::vector<Variable>& variables) -> const Variable* {
      const auto found = std::find_if(variables.begin(), variables.end(),
                                      [&](const Variable& v) { return v.name == name; });
      return found == variables.end() ? nullptr : &*found;
    };
    if (const Variable* v = find(kernel_.params)) return kParamWindow + v->offset;
    if (const Variable* v = find(kernel_.shared)) return v->offset;
    if (const Variable* v = find(kernel_.locals)) return kLocalWindow + v->offset;
    if (const Variable* v = find(module_.variables)) {
      if (v->is_dynamic) return behind_shared(*v);
      if (v->space == Space::kShared) fail(s, "shared variables of a module are not supported");
      return addresses_.at(name);
    }
    fail(s, "unknown variable " + name);
  }

  [[noreturn]] void fail(const Statement& s, const std::string& why) const {
    throw PtxError(why + ": " + module_.describe(kernel_, s));
  }

  const Module& module_;
  const Kernel& kernel_;
  const std::map<std::string, std::uint64_t>& addresses_;
};

}  // namespace

Program decode(const Module& module, const Kernel& kernel,
               const std::map<std::string, std::uint64_t>& addresses) {
  return Decoding(module, kernel, addresses).run();
}

bool has(const Statement& s, const char* modifier) {
  return std::find(s.opcode.begin() + 1, s.opcode.end(), modifier) != s.opcode.end();
}

bool has_no_other(const Statement& s, std::initializer_list<const char*> known) {
  return std::all_of(s.opcode.begin() + 1, s.opcode.end(), [&](const std::string& modifier) {
    return std::find(known.begin(), known.end(), modifier) != known.end();
  });
}

bool has_only(const Statement& s, const char* modifiers) {
  return std::all_of(s.opcode.begin() + 1, s.opcode.end(), [&](const std::string& part) {
    return type_of(part) != Type::kNone ||
           std::string_view(modifiers).find(" " + part + " ") != std::string_view::npos;
  });
}

Rounding rounding_of(const Statement& s) {
  if (has(s, "rz")) return Rounding::kZero;
  if (has(s, "rm")) return Rounding::kDown;
  if (has(s, "rp")) return Rounding::kUp;
  return has(s, "rna") ? Rounding::kAway : Rounding::kNearest;
}

Space space_of(const Statement& s) {
  if (has(s, "global")) return Space::kGlobal;
  if (has(s, "shared") || has(s, "shared::cta")) return Space::kShared;
  if (has(s, "shared::cluster")) return Space::kCluster;
  if (has(s, "local")) return Space::kLocal;
  if (has(s, "param")) return Space::kParam;
  if (has(s, "const")) return Space::kConst;
  return Space::kGeneric;
}

Type last_type(const Statement& s) {
  for (auto part = s.opcode.rbegin(); part != s.opcode.rend(); ++part) {
    if (const Type type = type_of(*part); type != Type::kNone) return type;
  }
  return Type::kNone;
}

}  // namespace ptx_machine
