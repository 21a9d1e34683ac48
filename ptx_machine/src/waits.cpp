// What threads that do not go on wait for: reports of deadlocks.
#include <algorithm>
#include <cstdio>

#include "mbarrier.h"
#include "spins.h"

namespace ptx_machine {
namespace {

constexpr std::size_t kMostLines = 64;

std::string hex(Mask lanes) {
  char text[16];
  std::snprintf(text, sizeof(text), "%08x", lanes);
  return text;
}

std::string counted(std::uint64_t number, const char* what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

// The value of an operand for the first lane of a group, if it is known.
std::optional<std::uint64_t> value_of(const Warp& warp, const Group& group, const Op& op,
                                      std::size_t number) {
  if (number >= op.values.size() || group.mask == 0) return std::nullopt;
  const Value& v = op.values[number];
  const int lane = std::countr_zero(group.mask);
  if (v.kind == Value::Kind::kConstant) return (*v.constant)[lane];
  if (v.kind != Value::Kind::kRegister || (warp.written[v.index] >> lane & 1) == 0) {
    return std::nullopt;
  }
  return warp.registers[v.index][lane] + static_cast<std::uint64_t>(v.offset);
}

std::string at_barrier(const Warp& warp, const Group& group, const Op& op) {
  const Barrier& b = warp.block->barriers[group.barrier];
  std::uint64_t expected = std::uint64_t{warp.block->running} * kLanes;
  if (op.values.size() > 1 && op.values[1].kind != Value::Kind::kPredicate) {
    expected = value_of(warp, group, op, 1).value_or(expected);
  }
  return "barrier " + std::to_string(group.barrier) + ", where " + std::to_string(b.arrived) +
         " of " + std::to_string(expected) + " threads have arrived";
}

std::string at_mbarrier(const Warp& warp, const Group& group, const Op& op) {
  const auto address = value_of(warp, group, op, 0), parity = value_of(warp, group, op, 1);
  if (!address) return "";
  const Place place{warp.block, *address & kOffsetMask};
  std::string text = "the mbarrier at offset " + std::to_string(place.offset);
  if (op.number == 1 && parity) text += " (parity " + std::to_string(*parity) + ")";
  try {
    const Mbarrier m = load_mbarrier(place);
    return text + ", whose phase of parity " + std::to_string(m.phase ? 1 : 0) + " still needs " +
           counted(static_cast<std::uint64_t>(m.pending), "arrival") + " of " +
           std::to_string(m.expected) + " and " + std::to_string(m.bytes) + " bytes";
  } catch (const MbarrierError& error) {
    return text + ": " + error.what();
  }
}

std::string for_registers(const Warp& warp, const Group& group, const Op& op) {
  const std::uint64_t wanted = value_of(warp, group, op, 0).value_or(warp.max_registers);
  return std::to_string((wanted - warp.max_registers) * kLanes) +
         " more registers, of which its block has " + std::to_string(warp.block->free_registers) +
         " free";
}

std::string reason_of(const Warp& warp, const Group& group, const Op& op) {
  const Statement& s = *op.statement;
  const std::string& name = s.opcode[0];
  if (group.barrier >= 0) return at_barrier(warp, group, op);
  Mask executing = group.mask;
  if (op.guard.kind == Value::Kind::kPredicate) {
    const Mask bits = warp.predicates[op.guard.index];
    executing &= op.guard.negated ? ~bits : bits;
  }
  const Mask elsewhere = warp.alive & ~executing;
  const std::string others = "lanes " + hex(elsewhere) + " of its warp, which " +
                             (executing == group.mask ? "are elsewhere" : "skip it");
  if (name == "mbarrier" && (s.opcode[1] == "try_wait" || s.opcode[1] == "test_wait"))
    return at_mbarrier(warp, group, op);
  if (name == "griddepcontrol" && has(s, "wait")) return "the end of the launch before it";
  if (name == "barrier" && has(s, "cluster") && has(s, "wait")) {
    const Cluster& cluster = *warp.block->cluster;
    if (op.flag && elsewhere != 0) return others;
    return "the barrier of its cluster, where " + std::to_string(cluster.arrived) + " of " +
           std::to_string(cluster.threads) + " threads have arrived";
  }
  const bool meets = has(s, "sync") || has(s, "aligned") || name == "wgmma" || name == "bar" ||
                     name == "barrier" || name == "mma" || name == "ldmatrix" || name == "stmatrix";
  if (!meets) return "";
  if (elsewhere != 0) return others;
  if (name == "setmaxnreg") return for_registers(warp, group, op);
  return name == "wgmma" ? "the other warps of its warpgroup" : "";
}

std::string standing_of(const Context& c, const Warp& warp, const Group& group) {
  if (group.pc >= static_cast<int>(c.program.ops.size())) return "";
  const bool polls = !group.waits && group.polled != nullptr;
  const Op& op = polls ? *group.polled : c.program.ops[group.pc];
  const std::string reason = polls && op.statement->opcode[0] != "mbarrier"
                                 ? describe_poll(c, warp, group, op)
                                 : reason_of(warp, group, op);
  return ", lanes " + hex(group.mask) + ": " +
         c.program.module->describe(*c.program.kernel, *op.statement) +
         (reason.empty() ? "" : "\n      waits for " + reason);
}

// The lines of one block; warps next to each other that do the same share one.
std::string standing_of(const Context& c, const Block& block) {
  struct Row {
    int first, last;
    std::string text;
  };
  std::vector<Row> rows;
  for (const Warp& warp : block.warps) {
    for (const Group& group : warp.groups) {
      const std::string text = standing_of(c, warp, group);
      const auto same = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
        return row.last == warp.index - 1 && row.text == text;
      });
      if (same != rows.end()) {
        same->last = warp.index;
      } else if (!text.empty()) {
        rows.push_back({warp.index, warp.index, text});
      }
    }
  }
  std::string text;
  for (const Row& row : rows) {
    const bool one = row.first == row.last;
    text += one ? "\n    warp " : "\n    warps ";
    text += std::to_string(row.first);
    if (!one) text.append("-").append(std::to_string(row.last));
    text += row.text;
  }
  return text;
}

}  // namespace

bool acts(const Statement& s) {
  const std::string& name = s.opcode[0];
  if (name == "st") return !has(s, "local");
  if (name == "mbarrier") return s.opcode[1] != "try_wait" && s.opcode[1] != "test_wait";
  if (name == "bar" || name == "barrier") return !has(s, "warp");
  if (name == "multimem") return !has(s, "ld_reduce");
  for (const char* other :
       {"red", "atom", "cp", "mma", "wmma", "wgmma", "stmatrix", "call", "discard", "tensormap"}) {
    if (name == other) return true;
  }
  return false;
}

bool changes(const Statement& s) {
  const std::string& name = s.opcode[0];
  if (name == "st") return true;
  return acts(s) && name != "bar" && name != "barrier" && name != "mma" && name != "wmma";
}

std::string describe_standing(const Context& c,
                              const std::vector<std::unique_ptr<Cluster>>& clusters) {
  struct Row {
    Dim first;
    std::uint64_t blocks;
    std::string text;
  };
  std::vector<Row> rows;
  for (const auto& cluster : clusters) {
    for (const auto& block : cluster->blocks) {
      const std::string text = standing_of(c, *block);
      const auto same =
          std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.text == text; });
      if (same != rows.end()) {
        same->blocks += 1;
      } else if (!text.empty()) {
        rows.push_back({block->index, 1, text});
      }
    }
  }
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i == kMostLines) {
      return text + "\n  and " + counted(rows.size() - i, "other block");
    }
    const Dim& b = rows[i].first;
    text += "\n  block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
            std::to_string(b.z) + ")";
    if (rows[i].blocks > 1) text += " and " + counted(rows[i].blocks - 1, "other") + " like it";
    text += rows[i].text;
  }
  return text;
}

}  // namespace ptx_machine
