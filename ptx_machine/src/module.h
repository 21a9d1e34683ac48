// A PTX module as the parser leaves it: variables, kernels, and statements whose names are resolved.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx_machine {

// Error about PTX text or its execution. The message names kernel, line and statement.
struct PtxError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Type : std::uint8_t {
  kNone,
  kPred,
  kB8,
  kB16,
  kB32,
  kB64,
  kB128,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF16,
  kBf16,
  kF32,
  kF64,
  kF16x2,
  kBf16x2,
};

// Returns the type of a name without its dot, or kNone.
Type type_of(const std::string& name);
int bytes_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);

// kShared is shared::cta, kCluster is shared::cluster.
enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kCluster, kLocal, kParam, kConst };

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  std::uint64_t bytes = 0;
  std::uint64_t align = 1;
  std::uint64_t offset = 0;  // in the parameters, shared or local memory of a kernel
  bool is_dynamic = false;   // an extern array of shared memory: its size comes with a launch
  std::vector<std::uint8_t> value;  // of a global variable: its first bytes; the others are zero
};

struct Operand {
  enum class Kind : std::uint8_t {
    kRegister,
    kPredicate,
    kNumber,   // an integer, or the bits of a literal such as 0f3F800000
    kSpecial,  // %tid.x and the like
    kSymbol,   // address of a variable
    kLabel,
    kAddress,  // [base + offset]; parts: the coordinates of a tensor copy
    kList,     // {a, b, ...}
    kSink,     // _
  };
  Kind kind = Kind::kSink;
  int index = -1;           // of the register or predicate, or of the base of an address, if it
                            // is one; of the statement behind a label
  bool negated = false;     // !p
  std::int64_t number = 0;  // value; of an address or symbol: the offset behind it
  bool is_float = false;    // the number is the bits of a double (0d...) or float (0f...)
  bool is_double = false;
  std::string name;  // of a special register, symbol or label
  int second = -1;   // p|q: index of q
  std::vector<Operand> parts;
};

struct Source {
  int file = 0;
  int line = 0;
};

struct Statement {
  std::vector<std::string> opcode;  // split at dots: {"ld", "global", "acquire", "sys", "b32"}
  int guard = -1;                   // predicate of @p, or -1
  bool guard_negated = false;
  std::vector<Operand> operands;
  int line = 0;  // of the PTX text
  Source source;
};

struct Register {
  std::string name;
  Type type = Type::kNone;
};

struct Kernel {
  std::string name;
  std::vector<Variable> params;
  std::uint64_t param_bytes = 0;
  std::vector<Register> registers;  // but predicates
  std::vector<std::string> predicates;
  std::vector<Variable> shared;
  std::uint64_t shared_bytes = 0;  // without dynamic shared memory, which follows
  std::vector<Variable> locals;
  std::uint64_t local_bytes = 0;
  std::vector<Statement> statements;
  int max_threads = 0;                 // .maxntid or .reqntid; 0: not given
  int min_blocks = 0;                  // .minnctapersm
  int max_registers = 0;               // .maxnreg
  std::vector<std::uint32_t> cluster;  // .reqnctapercluster, three sizes; empty: not given
  bool explicit_cluster = false;       // .explicitcluster: the launch or the kernel says how large
  int max_cluster = 0;                 // .maxclusterrank
};

struct Module {
  std::string target;                          // sm_80
  std::vector<std::string> lines;              // of the text, for messages
  std::unordered_map<int, std::string> files;  // of .loc
  std::vector<Variable> variables;             // global and const
  std::vector<std::unique_ptr<Kernel>> kernels;

  const Kernel& kernel(const std::string& name) const;
  // Returns kernel, PTX line, source line and text of a statement.
  std::string describe(const Kernel& kernel, const Statement& statement) const;
};

// Parses PTX as nvcc writes it.
std::unique_ptr<Module> parse(const std::string& text);

}  // namespace ptx_machine
