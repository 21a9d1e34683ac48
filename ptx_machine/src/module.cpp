#include "module.h"

#include <array>

namespace ptx_machine {
namespace {

struct TypeRow {
  const char* name;
  Type type;
  int bytes;
};

constexpr std::array kTypes{
    TypeRow{"pred", Type::kPred, 1},   TypeRow{"b8", Type::kB8, 1},
    TypeRow{"b16", Type::kB16, 2},     TypeRow{"b32", Type::kB32, 4},
    TypeRow{"b64", Type::kB64, 8},     TypeRow{"b128", Type::kB128, 16},
    TypeRow{"u8", Type::kU8, 1},       TypeRow{"u16", Type::kU16, 2},
    TypeRow{"u32", Type::kU32, 4},     TypeRow{"u64", Type::kU64, 8},
    TypeRow{"s8", Type::kS8, 1},       TypeRow{"s16", Type::kS16, 2},
    TypeRow{"s32", Type::kS32, 4},     TypeRow{"s64", Type::kS64, 8},
    TypeRow{"f16", Type::kF16, 2},     TypeRow{"bf16", Type::kBf16, 2},
    TypeRow{"f32", Type::kF32, 4},     TypeRow{"f64", Type::kF64, 8},
    TypeRow{"f16x2", Type::kF16x2, 4}, TypeRow{"bf16x2", Type::kBf16x2, 4},
};

}  // namespace

Type type_of(const std::string& name) {
  for (const TypeRow& row : kTypes) {
    if (name == row.name) return row.type;
  }
  return Type::kNone;
}

int bytes_of(Type type) {
  for (const TypeRow& row : kTypes) {
    if (type == row.type) return row.bytes;
  }
  return 0;
}

bool is_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

bool is_float(Type type) { return type >= Type::kF16; }

const Kernel& Module::kernel(const std::string& name) const {
  for (const auto& kernel : kernels) {
    if (kernel->name == name) return *kernel;
  }
  throw PtxError("the module has no kernel " + name);
}

std::string Module::describe(const Kernel& kernel, const Statement& statement) const {
  std::string text = kernel.name + ", PTX line " + std::to_string(statement.line);
  if (const auto file = files.find(statement.source.file);
      file != files.end() && statement.source.line > 0) {
    text += " (" + file->second + ":" + std::to_string(statement.source.line) + ")";
  }
  if (statement.line <= static_cast<int>(lines.size())) {
    const std::string& line = lines[statement.line - 1];
    const auto begin = line.find_first_not_of(" \t");
    text += ": " + (begin == std::string::npos ? line : line.substr(begin));
  }
  return text;
}

}  // namespace ptx_machine
