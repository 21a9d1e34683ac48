#include <map>
#include <sstream>

#include "reader.h"

namespace emulator {
namespace {

std::vector<std::string> split_at_dots(const std::string& word) {
  std::vector<std::string> parts;
  std::stringstream stream(word);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  return parts;
}

std::uint64_t aligned(std::uint64_t offset, std::uint64_t align) {
  return (offset + align - 1) / align * align;
}

std::unique_ptr<Module> module_of(const std::string& text) {
  auto module = std::make_unique<Module>();
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) module->lines.push_back(line);
  return module;
}

class Parser : Reader {
 public:
  Parser(const std::string& text, std::unique_ptr<Module> module)
      : Reader(text, module->lines), module_(std::move(module)) {}

  std::unique_ptr<Module> run() {
    find_functions();
    while (peek().kind != Token::Kind::kEnd) top_level();
    return std::move(module_);
  }

 private:
  // -- declarations ------------------------------------------------------------------------------

  void top_level() {
    if (is(".version") || is(".address_size")) return skip_line();
    if (accept(".target")) {
      module_->target = word();
      while (accept(",")) word();
      return;
    }
    if (is(".file")) return file();
    if (accept(".section")) return section();
    bool is_extern = false;
    while (is(".visible") || is(".weak") || is(".extern") || is(".common")) {
      is_extern |= take().text == ".extern";
    }
    if (accept(".entry")) return entry();
    if (accept(".func")) return function();
    const Space space = space_of(take().text);
    for (Variable& v : declaration(space, is_extern)) module_->variables.push_back(std::move(v));
  }

  void file() {
    take();
    const auto number = static_cast<int>(integer());
    module_->files[number] = take().text;
    while (accept(",")) integer();
  }

  void section() {
    take();
    expect("{");
    while (!accept("}")) ++at_;
  }

  Space space_of(const std::string& name) {
    if (name == ".global") return Space::kGlobal;
    if (name == ".const") return Space::kConst;
    if (name == ".shared") return Space::kShared;
    if (name == ".local") return Space::kLocal;
    if (name == ".param") return Space::kParam;
    --at_;
    fail("unknown directive " + name);
  }

  // Parses `.align 8 .b8 name[16] = {..}, ...;` behind the state space.
  std::vector<Variable> declaration(Space space, bool is_extern) {
    Variable common;
    common.space = space;
    Type type = Type::kNone;
    int lanes = 1;
    common.align = 0;
    while (peek().text.starts_with(".")) {
      const std::string name = take().text.substr(1);
      if (name == "align") {
        common.align = integer();
      } else if (name == "v2" || name == "v4") {
        lanes = name[1] - '0';
      } else if (name == "ptr" || name == "global" || name == "const" || name == "shared") {
        // .param .u64 .ptr .global .align 4 says where a pointer points.
      } else if (type_of(name) != Type::kNone) {
        type = type_of(name);
      } else {
        --at_;
        fail("unknown attribute " + name);
      }
    }
    const std::uint64_t element = bytes_of(type) * lanes;
    if (common.align == 0) common.align = element;
    std::vector<Variable> found;
    do {
      Variable v = common;
      v.name = word();
      std::uint64_t count = 1;
      while (accept("[")) {
        if (accept("]")) {
          v.is_dynamic = true;
          count = 0;
        } else {
          count *= integer();
          expect("]");
        }
      }
      v.bytes = element * count;
      v.is_dynamic |= is_extern && space == Space::kShared;
      if (accept("=")) initial_value(v, bytes_of(type));
      found.push_back(std::move(v));
    } while (space != Space::kParam && accept(","));
    if (space != Space::kParam) expect(";");
    return found;
  }

  void initial_value(Variable& v, int element) {
    if (accept("{")) {
      do initial_value(v, element);
      while (accept(","));
      expect("}");
      return;
    }
    if (peek().kind == Token::Kind::kWord) fail("addresses as initial values are not supported");
    const Operand literal = number();
    for (int byte = 0; byte < element; ++byte) {
      v.value.push_back(static_cast<std::uint8_t>(literal.number >> (8 * byte)));
    }
  }

  // -- functions ---------------------------------------------------------------------------------

  // Functions with a body become a part of each kernel that calls them, at each call. They may stand
  // behind it, so they are looked for first.
  void find_functions() {
    for (; peek().kind != Token::Kind::kEnd; ++at_) {
      if (!is(".func")) continue;
      const std::size_t begin = ++at_;
      skip_list();
      const std::string name = word();
      skip_list();
      while (accept(".noreturn")) {
      }
      if (is("{")) functions_[name] = begin;
    }
    at_ = 0;
  }

  void skip_to(const char* end) {
    while (!accept(end)) {
      if (peek().kind == Token::Kind::kEnd) fail(std::string("expected '") + end + "'");
      ++at_;
    }
  }

  void skip_list() {
    if (accept("(")) skip_to(")");
  }

  // Of a declaration there is nothing to keep: which functions are known is seen at their calls.
  void function() {
    while (!is("{") && !accept(";")) ++at_;
    for (int depth = 0; is("{") || depth > 0; ++at_) depth += is("{") ? 1 : is("}") ? -1 : 0;
  }

  // Results or parameters of a function stand for the variables of the call.
  void bind(const std::vector<Operand>& given) {
    std::size_t number = 0;
    if (accept("(")) {
      while (!accept(")")) {
        expect(".param");
        for (const Variable& v : declaration(Space::kParam, false)) {
          if (number == given.size()) fail("a call passes too little to this function");
          scopes_.back().names[v.name] = given[number++];
        }
        accept(",");
      }
    }
    if (number != given.size()) fail("a call passes too much to this function");
  }

  // Puts the statements of a function where it is called. Its returns lead behind them.
  void insert(const Statement& call, const std::vector<Operand>& results, const std::string& name,
              const std::vector<Operand>& arguments) {
    if (std::find(calls_.begin(), calls_.end(), name) != calls_.end()) {
      fail("recursion of " + name + " is not supported");
    }
    const std::size_t first = kernel_->statements.size(), behind = at_;
    if (call.guard >= 0) leave_function(call, true);
    const Source before = source_;
    calls_.push_back(name);
    scopes_.emplace_back();
    at_ = functions_.at(name);
    bind(results);
    word();
    bind(arguments);
    while (accept(".noreturn")) {
    }
    body();
    scopes_.pop_back();
    calls_.pop_back();
    resolve_labels(first, {{kEnd, static_cast<int>(kernel_->statements.size())}});
    source_ = before;
    at_ = behind;
  }

  // Goes on behind the function; `otherwise`: where the guard of `like` does not hold.
  void leave_function(const Statement& like, bool otherwise = false) {
    Statement s = like;
    s.opcode = {"bra"};
    s.operands = {label(kEnd)};
    if (otherwise) s.guard_negated = !like.guard_negated;
    kernel_->statements.push_back(std::move(s));
  }

  // -- kernels -----------------------------------------------------------------------------------

  void entry() {
    module_->kernels.push_back(std::make_unique<Kernel>());
    kernel_ = module_->kernels.back().get();
    kernel_->name = word();
    if (accept("(")) params();
    while (!is("{")) attribute();
    scopes_.clear();
    source_ = {};
    body();
    for (const Statement& s : kernel_->statements) {
      for (const Operand& o : s.operands) {
        if (o.kind != Operand::Kind::kLabel || o.index >= 0) continue;
        throw PtxError("unknown name " + o.name + " in " + module_->describe(*kernel_, s));
      }
    }
  }

  void params() {
    while (!accept(")")) {
      expect(".param");
      for (Variable& v : declaration(Space::kParam, false)) {
        v.offset = kernel_->param_bytes = aligned(kernel_->param_bytes, v.align);
        kernel_->param_bytes += v.bytes;
        kernel_->params.push_back(std::move(v));
      }
      accept(",");
    }
  }

  void attribute() {
    const std::string name = word();
    if (name == ".maxntid" || name == ".reqntid") {
      kernel_->max_threads = static_cast<int>(integer());
      while (accept(",")) kernel_->max_threads *= static_cast<int>(integer());
    } else if (name == ".minnctapersm") {
      kernel_->min_blocks = static_cast<int>(integer());
    } else if (name == ".maxnreg") {
      kernel_->max_registers = static_cast<int>(integer());
    } else if (name == ".maxclusterrank") {
      kernel_->max_cluster = static_cast<int>(integer());
    } else if (name == ".reqnctapercluster") {
      do kernel_->cluster.push_back(static_cast<std::uint32_t>(integer()));
      while (accept(","));
      kernel_->cluster.resize(3, 1);
    } else if (name == ".explicitcluster") {
      kernel_->explicit_cluster = true;
    } else if (name == ".pragma") {
      take();
      expect(";");
    } else if (name != ".noreturn") {
      --at_;
      fail("unknown attribute " + name);
    }
  }

  void body() {
    expect("{");
    scopes_.emplace_back();
    const std::size_t first = kernel_->statements.size();
    while (!accept("}")) {
      if (is("{")) {
        body();
      } else {
        line_of_body();
      }
    }
    resolve_labels(first, scopes_.back().labels);
    scopes_.pop_back();
  }

  // A label is known in its scope only: inline assembly defines the same one again and again.
  void resolve_labels(std::size_t first, const std::map<std::string, int>& labels) {
    for (std::size_t i = first; i < kernel_->statements.size(); ++i) {
      for (Operand& o : kernel_->statements[i].operands) {
        if (o.kind != Operand::Kind::kLabel || o.index >= 0) continue;
        if (const auto found = labels.find(o.name); found != labels.end()) o.index = found->second;
      }
    }
  }

  void line_of_body() {
    if (is(".loc")) return location();
    if (accept(".reg")) return registers();
    if (accept(".pragma")) {
      take();
      expect(";");
      return;
    }
    if (is(".shared") || is(".local")) {
      const Space space = space_of(take().text);
      for (Variable& v : declaration(space, false)) place(std::move(v));
      return;
    }
    if (accept(".param")) {
      for (Variable& v : declaration(Space::kLocal, false)) place_argument(std::move(v));
      return;
    }
    if (peek().kind == Token::Kind::kWord && is(":", 1)) {
      const std::string label = take().text;
      take();
      if (accept(".branchtargets")) return targets(label);
      scopes_.back().labels[label] = static_cast<int>(kernel_->statements.size());
      return;
    }
    statement();
  }

  void targets(const std::string& list) {
    std::vector<std::string>& labels = lists_[list];
    labels.clear();
    do labels.push_back(word());
    while (accept(","));
    expect(";");
  }

  void location() {
    const int line = take().line;
    source_.file = static_cast<int>(integer());
    source_.line = static_cast<int>(integer());
    while (peek().line == line) ++at_;
  }

  void registers() {
    const Type type = type_of(take().text.substr(1));
    if (type == Type::kNone) fail("unknown type of a register");
    do {
      const std::string name = word();
      if (accept("<")) {
        const auto count = integer();
        expect(">");
        for (std::int64_t i = 0; i < count; ++i) add_register(name + std::to_string(i), type);
      } else {
        add_register(name, type);
      }
    } while (accept(","));
    expect(";");
  }

  void add_register(const std::string& name, Type type) {
    Operand operand;
    if (type == Type::kPred) {
      operand.kind = Operand::Kind::kPredicate;
      operand.index = static_cast<int>(kernel_->predicates.size());
      kernel_->predicates.push_back(name);
    } else {
      operand.kind = Operand::Kind::kRegister;
      operand.index = static_cast<int>(kernel_->registers.size());
      kernel_->registers.push_back({name, type});
    }
    scopes_.back().names[name] = operand;
  }

  void place(Variable v) {
    const bool shared = v.space == Space::kShared;
    // A function that is called again: its variables are not in use, as nothing calls itself.
    if (!calls_.empty() && has(shared ? kernel_->shared : kernel_->locals, v.name)) return;
    std::uint64_t& bytes = shared ? kernel_->shared_bytes : kernel_->local_bytes;
    v.offset = aligned(bytes, v.align);
    bytes = v.offset + v.bytes;
    (shared ? kernel_->shared : kernel_->locals).push_back(std::move(v));
  }

  // An argument of a call lies in the thread's local memory. Each scope has its own of a name.
  void place_argument(Variable v) {
    Operand operand;
    operand.kind = Operand::Kind::kSymbol;
    operand.name = v.name + "#" + std::to_string(kernel_->locals.size());
    scopes_.back().names[v.name] = operand;
    v.name = operand.name;
    place(std::move(v));
  }

  // -- statements --------------------------------------------------------------------------------

  void statement() {
    Statement s;
    s.line = peek().line;
    s.source = source_;
    if (accept("@")) {
      s.guard_negated = accept("!");
      const Operand guard = named(word());
      if (guard.kind != Operand::Kind::kPredicate) fail("expected a predicate");
      s.guard = guard.index;
    }
    s.opcode = split_at_dots(word());
    if (s.opcode[0] == "call") return call(std::move(s));
    while (!accept(";")) {
      s.operands.push_back(operand());
      if (!is(";")) expect(",");
    }
    if (s.opcode[0] == "ret" && !calls_.empty()) return leave_function(s);
    if (s.opcode[0] == "brx") return branch_by_number(std::move(s));
    if (s.opcode[0] == "set") return compare_into_register(std::move(s));
    if (s.opcode[0] == "slct") return choose_by_sign(std::move(s));
    kernel_->statements.push_back(std::move(s));
  }

  // brx.idx number, list: a branch for each label of the list, and a trap behind the last one.
  void branch_by_number(Statement s) {
    const auto list = s.operands.size() == 2 ? lists_.find(s.operands[1].name) : lists_.end();
    if (s.opcode.size() < 2 || s.opcode[1] != "idx" || list == lists_.end()) {
      fail("brx.idx needs a list of .branchtargets in front of it");
    }
    const std::size_t first = kernel_->statements.size();
    Statement branch = s;
    branch.opcode = {"bra"};
    const Operand number = s.operands[0];
    if (s.guard >= 0) {
      branch.guard_negated = !s.guard_negated;
      branch.operands = {label(kEnd)};
      kernel_->statements.push_back(branch);
    }
    const Operand which = new_predicate();
    for (std::size_t i = 0; i < list->second.size(); ++i) {
      Statement compare = s;
      compare.guard = -1;
      compare.opcode = {"setp", "eq", "u32"};
      compare.operands = {which, number, constant(static_cast<std::int64_t>(i))};
      kernel_->statements.push_back(std::move(compare));
      branch.guard = which.index;
      branch.guard_negated = false;
      branch.operands = {label(list->second[i])};
      kernel_->statements.push_back(branch);
    }
    s.guard = -1;
    s.opcode = {"trap"};
    s.operands.clear();
    kernel_->statements.push_back(std::move(s));
    resolve_labels(first, {{kEnd, static_cast<int>(kernel_->statements.size())}});
  }

  // set.CmpOp.dtype.stype and its like: setp, and a choice of the two values.
  void compare_into_register(Statement s) {
    if (s.opcode.size() < 4) fail("set needs a comparison and two types");
    const std::string type = s.opcode[s.opcode.size() - 2], of = s.opcode.back();
    const bool pair = of == "f16x2" || of == "bf16x2";
    Operand target = s.operands[0], first = new_predicate(), second = new_predicate();
    Statement compare = s;
    compare.opcode.erase(compare.opcode.end() - 2);
    compare.opcode[0] = "setp";
    compare.operands[0] = first;
    if (pair) compare.operands[0].second = second.index;
    const std::int64_t yes = value_of_true(type, pair);
    kernel_->statements.push_back(std::move(compare));
    if (!pair) return choose(s, bits_like(type), target, constant(yes), constant(0), first);
    const Operand low = new_register(Type::kB32), high = new_register(Type::kB32);
    choose(s, "b32", low, constant(yes), constant(0), first);
    choose(s, "b32", high, constant(yes << 16), constant(0), second);
    s.opcode = {"or", "b32"};
    s.operands = {target, low, high};
    kernel_->statements.push_back(std::move(s));
  }

  // What set writes where the comparison holds: one, or all bits. For pairs, in each half.
  std::int64_t value_of_true(const std::string& type, bool pair) const {
    if (type == "f32" && !pair) return 0x3F800000;
    if (type == (pair ? "f16x2" : "f16")) return 0x3C00;
    if (type == (pair ? "bf16x2" : "bf16")) return 0x3F80;
    if (type == "u32" || type == "s32") return pair ? 0xFFFF : 0xFFFFFFFF;
    if ((type == "u16" || type == "s16") && !pair) return 0xFFFF;
    fail("set does not know the type " + type);
  }
  static std::string bits_like(const std::string& type) {
    return type.ends_with("16") ? "b16" : "b32";
  }

  // slct.dtype.s32 and .f32: the first value where the third operand is not negative.
  void choose_by_sign(Statement s) {
    const std::string of = s.opcode.back();
    if (s.opcode.size() < 3 || s.operands.size() != 4 || (of != "s32" && of != "f32")) {
      fail("slct needs a type, and s32 or f32");
    }
    const Operand chosen = new_predicate();
    Statement compare = s;
    compare.opcode = {"setp", "ge"};
    if (s.opcode[1] == "ftz") compare.opcode.push_back("ftz");
    compare.opcode.push_back(of);
    compare.operands = {chosen, s.operands[3], constant(0)};
    kernel_->statements.push_back(std::move(compare));
    choose(s, s.opcode[s.opcode.size() - 2], s.operands[0], s.operands[1], s.operands[2], chosen);
  }

  void choose(const Statement& like, const std::string& type, const Operand& target,
              const Operand& yes, const Operand& no, const Operand& which) {
    Statement s = like;
    s.opcode = {"selp", type};
    s.operands = {target, yes, no, which};
    kernel_->statements.push_back(std::move(s));
  }

  // Registers that only the parser's own statements use.
  Operand new_register(Type type) {
    scopes_.emplace_back();
    add_register("own", type);
    const Operand made = scopes_.back().names.at("own");
    scopes_.pop_back();
    return made;
  }
  Operand new_predicate() { return new_register(Type::kPred); }

  static Operand constant(std::int64_t value) {
    Operand o;
    o.kind = Operand::Kind::kNumber;
    o.number = value;
    return o;
  }

  static Operand label(const std::string& name) {
    Operand o;
    o.kind = Operand::Kind::kLabel;
    o.name = name;
    return o;
  }

  // call (results), function, (arguments): lists of variables, and the name as a sink.
  void call(Statement s) {
    Operand results, name, arguments;
    results.kind = arguments.kind = Operand::Kind::kList;
    if (accept("(")) {
      while (!accept(")")) results.parts.push_back(operand());
      expect(",");
    }
    name.name = word();
    if (accept(",")) {
      expect("(");
      while (!accept(")")) {
        arguments.parts.push_back(operand());
        accept(",");
      }
    }
    expect(";");
    if (functions_.contains(name.name)) return insert(s, results.parts, name.name, arguments.parts);
    s.operands = {results, name, arguments};
    kernel_->statements.push_back(std::move(s));
  }

  Operand operand() {
    if (is("[")) return address();
    if (is("{")) return list();
    if (accept("!")) {
      Operand o = named(word());
      o.negated = true;
      return o;
    }
    if (peek().kind == Token::Kind::kNumber || is("-")) return number();
    Operand o = named(word());
    if (accept("|")) o.second = named(word()).index;
    if (o.kind == Operand::Kind::kSymbol && (is("+") || is("-"))) o.number = offset();
    return o;
  }

  std::int64_t offset() {
    accept("+");
    return integer();
  }

  Operand address() {
    expect("[");
    Operand o;
    o.kind = Operand::Kind::kAddress;
    if (peek().kind == Token::Kind::kNumber) {
      o.number = integer();
    } else {
      const Operand base = named(word());
      o.index = base.kind == Operand::Kind::kRegister ? base.index : -1;
      if (base.kind == Operand::Kind::kSymbol) o.name = base.name;
      if (base.kind != Operand::Kind::kRegister && base.kind != Operand::Kind::kSymbol) {
        fail("expected a register or variable as the base of an address");
      }
    }
    if (is("+") || is("-")) o.number += offset();
    while (accept(",")) o.parts.push_back(operand());
    expect("]");
    return o;
  }

  Operand list() {
    expect("{");
    Operand o;
    o.kind = Operand::Kind::kList;
    while (!accept("}")) {
      o.parts.push_back(operand());
      if (!is("}")) expect(",");
    }
    return o;
  }

  Operand number() {
    const bool negative = accept("-");
    if (peek().kind != Token::Kind::kNumber) fail("expected a number");
    const std::string text = peek().text;
    Operand o;
    o.kind = Operand::Kind::kNumber;
    const bool literal = text.size() > 2 && text[0] == '0';
    if (literal && (text[1] == 'f' || text[1] == 'F') && text.size() == 10) {
      o.number = static_cast<std::int64_t>(std::stoull(text.substr(2), nullptr, 16));
      o.is_float = true;
      if (negative) o.number ^= std::int64_t{1} << 31;
      take();
    } else if (literal && (text[1] == 'd' || text[1] == 'D') && text.size() == 18) {
      o.number = static_cast<std::int64_t>(std::stoull(text.substr(2), nullptr, 16));
      o.is_double = true;
      if (negative) o.number ^= std::int64_t{1} << 63;
      take();
    } else {
      o.number = integer();
      if (negative) o.number = -o.number;
    }
    return o;
  }

  // Returns what a name in a statement stands for. Labels may come later, so they are checked at
  // the end of the kernel.
  Operand named(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->names.find(name);
      if (found != scope->names.end()) return found->second;
    }
    Operand o;
    o.name = name;
    if (name == "_") return o;
    if (name[0] == '%') {
      o.kind = Operand::Kind::kSpecial;
    } else {
      take_shared(name);
      o.kind = is_variable(name) ? Operand::Kind::kSymbol : Operand::Kind::kLabel;
    }
    return o;
  }

  static bool has(const std::vector<Variable>& variables, const std::string& name) {
    return std::any_of(variables.begin(), variables.end(),
                       [&](const Variable& v) { return v.name == name; });
  }

  // Each kernel that names a shared variable of the module has one of its own.
  void take_shared(const std::string& name) {
    if (has(kernel_->shared, name)) return;
    for (const Variable& v : module_->variables) {
      if (v.name == name && v.space == Space::kShared && !v.is_dynamic) place(v);
    }
  }

  bool is_variable(const std::string& name) const {
    return has(kernel_->params, name) || has(kernel_->shared, name) || has(kernel_->locals, name) ||
           has(module_->variables, name);
  }

  std::unique_ptr<Module> module_;
  Kernel* kernel_ = nullptr;
  struct Scope {
    std::map<std::string, Operand> names;  // registers and predicates
    std::map<std::string, int> labels;     // index of the statement behind
  };
  // Where a call or a branch of the parser's own making leads; no label of a text is like that.
  static constexpr const char* kEnd = "<end>";
  std::vector<Scope> scopes_;
  Source source_;
  std::map<std::string, std::size_t> functions_;           // with a body: the token behind .func
  std::vector<std::string> calls_;                         // of functions, that the parser is in
  std::map<std::string, std::vector<std::string>> lists_;  // of .branchtargets
};

}  // namespace

std::unique_ptr<Module> parse(const std::string& text) {
  return Parser(text, module_of(text)).run();
}

}  // namespace emulator
