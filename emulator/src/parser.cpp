#include <map>
#include <sstream>

#include "lexer.h"
#include "module.h"

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

class Parser {
 public:
  explicit Parser(const std::string& text) : tokens_(tokens_of(text)), module_(new Module) {
    std::stringstream stream(text);
    for (std::string line; std::getline(stream, line);) module_->lines.push_back(line);
  }

  std::unique_ptr<Module> run() {
    while (peek().kind != Token::Kind::kEnd) top_level();
    return std::move(module_);
  }

 private:
  // -- tokens ------------------------------------------------------------------------------------

  const Token& peek(int ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  const Token& take() {
    const Token& token = peek();
    ++at_;
    return token;
  }
  bool is(const char* text, int ahead = 0) const {
    return peek(ahead).kind != Token::Kind::kString && peek(ahead).text == text;
  }
  bool accept(const char* text) {
    if (!is(text)) return false;
    ++at_;
    return true;
  }
  void expect(const char* text) {
    if (!accept(text)) fail(std::string("expected '") + text + "'");
  }
  std::string word() {
    if (peek().kind != Token::Kind::kWord) fail("expected a name");
    return take().text;
  }
  [[noreturn]] void fail(const std::string& why) const {
    const int line = peek().line;
    std::string text = "PTX line " + std::to_string(line) + ": " + why;
    if (line >= 1 && line <= static_cast<int>(module_->lines.size())) {
      text += "\n  " + module_->lines[line - 1];
    }
    throw PtxError(text);
  }
  void skip_line() {
    for (const int line = peek().line; peek().line == line && peek().kind != Token::Kind::kEnd;) {
      ++at_;
    }
  }

  std::int64_t integer() {
    const bool negative = accept("-");
    if (peek().kind != Token::Kind::kNumber) fail("expected a number");
    std::string digits = take().text;
    if (digits.back() == 'U') digits.pop_back();
    const auto value = static_cast<std::int64_t>(std::stoull(digits, nullptr, 0));
    return negative ? -value : value;
  }

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

  // A declaration, such as that of vprintf. Which functions are known is seen at their calls.
  void function() {
    if (accept("(")) skip_to(")");
    word();
    if (accept("(")) skip_to(")");
    while (accept(".noreturn")) {
    }
    if (!accept(";")) fail("functions are not supported: everything must be inlined");
  }

  void skip_to(const char* end) {
    while (!accept(end)) {
      if (peek().kind == Token::Kind::kEnd) fail(std::string("expected '") + end + "'");
      ++at_;
    }
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
      scopes_.back().labels[label] = static_cast<int>(kernel_->statements.size());
      return;
    }
    statement();
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
    kernel_->statements.push_back(std::move(s));
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
  Operand named(const std::string& name) const {
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
      o.kind = is_variable(name) ? Operand::Kind::kSymbol : Operand::Kind::kLabel;
    }
    return o;
  }

  bool is_variable(const std::string& name) const {
    const auto holds = [&](const std::vector<Variable>& variables) {
      for (const Variable& v : variables) {
        if (v.name == name) return true;
      }
      return false;
    };
    return holds(kernel_->params) || holds(kernel_->shared) || holds(kernel_->locals) ||
           holds(module_->variables);
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  std::unique_ptr<Module> module_;
  Kernel* kernel_ = nullptr;
  struct Scope {
    std::map<std::string, Operand> names;  // registers and predicates
    std::map<std::string, int> labels;     // index of the statement behind
  };
  std::vector<Scope> scopes_;
  Source source_;
};

}  // namespace

std::unique_ptr<Module> parse(const std::string& text) { return Parser(text).run(); }

}  // namespace emulator
