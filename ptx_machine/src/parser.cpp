// What PTX text consists of: directives, declarations, functions, kernels, and their bodies.
#include "parser.h"

#include <sstream>

namespace ptx_machine {
namespace {

std::uint64_t aligned(std::uint64_t offset, std::uint64_t align) {
  return (offset + align - 1) / align * align;
}

std::unique_ptr<Module> module_of(const std::string& text) {
  auto module = std::make_unique<Module>();
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) module->lines.push_back(line);
  return module;
}

}  // namespace

// -- declarations ----------------------------------------------------------------------------------

void Parser::top_level() {
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

void Parser::file() {
  take();
  const auto number = static_cast<int>(integer());
  module_->files[number] = take().text;
  while (accept(",")) integer();
}

void Parser::section() {
  take();
  expect("{");
  while (!accept("}")) ++at_;
}

Space Parser::space_of(const std::string& name) {
  if (name == ".global") return Space::kGlobal;
  if (name == ".const") return Space::kConst;
  if (name == ".shared") return Space::kShared;
  if (name == ".local") return Space::kLocal;
  if (name == ".param") return Space::kParam;
  --at_;
  fail("unknown directive " + name);
}

// Parses `.align 8 .b8 name[16] = {..}, ...;` behind the state space.
std::vector<Variable> Parser::declaration(Space space, bool is_extern) {
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

void Parser::initial_value(Variable& v, int element) {
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

// -- functions -------------------------------------------------------------------------------------

// Functions with a body become a part of each kernel that calls them, at each call. They may stand
// behind it, so they are looked for first.
void Parser::find_functions() {
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

void Parser::skip_to(const char* end) {
  while (!accept(end)) {
    if (peek().kind == Token::Kind::kEnd) fail(std::string("expected '") + end + "'");
    ++at_;
  }
}

void Parser::skip_list() {
  if (accept("(")) skip_to(")");
}

// Of a declaration there is nothing to keep: which functions are known is seen at their calls.
void Parser::function() {
  while (!is("{") && !accept(";")) ++at_;
  for (int depth = 0; is("{") || depth > 0; ++at_) depth += is("{") ? 1 : is("}") ? -1 : 0;
}

// Results or parameters of a function stand for the variables of the call.
void Parser::bind(const std::vector<Operand>& given) {
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
void Parser::insert(const Statement& call, const std::vector<Operand>& results,
                    const std::string& name, const std::vector<Operand>& arguments) {
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
void Parser::leave_function(const Statement& like, bool otherwise) {
  Statement s = like;
  s.opcode = {"bra"};
  s.operands = {label(kEnd)};
  if (otherwise) s.guard_negated = !like.guard_negated;
  kernel_->statements.push_back(std::move(s));
}

// -- kernels ---------------------------------------------------------------------------------------

void Parser::entry() {
  module_->kernels.push_back(std::make_unique<Kernel>());
  kernel_ = module_->kernels.back().get();
  kernel_->name = word();
  if (accept("(")) params();
  while (!is("{")) {
    if (accept(";")) {  // a declaration
      module_->kernels.pop_back();
      return;
    }
    attribute();
  }
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

void Parser::params() {
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

void Parser::attribute() {
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

void Parser::body() {
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
void Parser::resolve_labels(std::size_t first, const std::map<std::string, int>& labels) {
  for (std::size_t i = first; i < kernel_->statements.size(); ++i) {
    for (Operand& o : kernel_->statements[i].operands) {
      if (o.kind != Operand::Kind::kLabel || o.index >= 0) continue;
      if (const auto found = labels.find(o.name); found != labels.end()) o.index = found->second;
    }
  }
}

void Parser::line_of_body() {
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

void Parser::targets(const std::string& list) {
  std::vector<std::string>& labels = lists_[list];
  labels.clear();
  do labels.push_back(word());
  while (accept(","));
  expect(";");
}

void Parser::location() {
  const int line = take().line;
  source_.file = static_cast<int>(integer());
  source_.line = static_cast<int>(integer());
  while (peek().line == line) ++at_;
}

void Parser::registers() {
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

void Parser::add_register(const std::string& name, Type type) {
  Operand operand;
  if (type == Type::kB128) {  // a list of its words, the lower one first
    scopes_.emplace_back();
    operand.kind = Operand::Kind::kList;
    for (const char* word : {".low", ".high"}) {
      add_register(name + word, Type::kB64);
      operand.parts.push_back(scopes_.back().names.at(name + word));
    }
    scopes_.pop_back();
  } else if (type == Type::kPred) {
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

void Parser::place(Variable v) {
  const bool shared = v.space == Space::kShared;
  // A function that is called again: its variables are not in use, as nothing calls itself.
  if (!calls_.empty() && has(shared ? kernel_->shared : kernel_->locals, v.name)) return;
  std::uint64_t& bytes = shared ? kernel_->shared_bytes : kernel_->local_bytes;
  v.offset = aligned(bytes, v.align);
  bytes = v.offset + v.bytes;
  (shared ? kernel_->shared : kernel_->locals).push_back(std::move(v));
}

// An argument of a call lies in the thread's local memory. Each scope has its own of a name.
void Parser::place_argument(Variable v) {
  Operand operand;
  operand.kind = Operand::Kind::kSymbol;
  operand.name = v.name + "#" + std::to_string(kernel_->locals.size());
  scopes_.back().names[v.name] = operand;
  v.name = operand.name;
  place(std::move(v));
}

std::unique_ptr<Module> parse(const std::string& text) {
  return Parser(text, module_of(text)).run();
}

}  // namespace ptx_machine
