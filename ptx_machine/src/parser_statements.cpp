// Statements of PTX text, and their operands; calls, and statements that become several.
#include <bit>
#include <sstream>

#include "parser.h"
#include "uncommon.h"

namespace ptx_machine {
namespace {

std::vector<std::string> split_at_dots(const std::string& word) {
  std::vector<std::string> parts;
  std::stringstream stream(word);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  return parts;
}

}  // namespace

void Parser::statement() {
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
  if ((s.opcode[0] == "alloca" || s.opcode[0] == "stacksave") && !has(kernel_->locals, kStack)) {
    Variable stack;
    stack.name = kStack;
    stack.space = Space::kLocal;
    stack.bytes = kStackBytes;
    stack.align = 16;
    place(std::move(stack));
  }
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
void Parser::branch_by_number(Statement s) {
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
void Parser::compare_into_register(Statement s) {
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
std::int64_t Parser::value_of_true(const std::string& type, bool pair) const {
  if (type == "f32" && !pair) return 0x3F800000;
  if (type == (pair ? "f16x2" : "f16")) return 0x3C00;
  if (type == (pair ? "bf16x2" : "bf16")) return 0x3F80;
  if (type == "u32" || type == "s32") return pair ? 0xFFFF : 0xFFFFFFFF;
  if ((type == "u16" || type == "s16") && !pair) return 0xFFFF;
  fail("set does not know the type " + type);
}

std::string Parser::bits_like(const std::string& type) {
  return type.ends_with("16") ? "b16" : "b32";
}

// slct.dtype.s32 and .f32: the first value where the third operand is not negative.
void Parser::choose_by_sign(Statement s) {
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

void Parser::choose(const Statement& like, const std::string& type, const Operand& target,
                    const Operand& yes, const Operand& no, const Operand& which) {
  Statement s = like;
  s.opcode = {"selp", type};
  s.operands = {target, yes, no, which};
  kernel_->statements.push_back(std::move(s));
}

// Registers that only the parser's own statements use.
Operand Parser::new_register(Type type) {
  scopes_.emplace_back();
  add_register("own", type);
  const Operand made = scopes_.back().names.at("own");
  scopes_.pop_back();
  return made;
}

Operand Parser::new_predicate() { return new_register(Type::kPred); }

Operand Parser::constant(std::int64_t value) {
  Operand o;
  o.kind = Operand::Kind::kNumber;
  o.number = value;
  return o;
}

Operand Parser::label(const std::string& name) {
  Operand o;
  o.kind = Operand::Kind::kLabel;
  o.name = name;
  return o;
}

// call (results), function, (arguments): lists of variables, and the name as a sink.
void Parser::call(Statement s) {
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

Operand Parser::operand() {
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

std::int64_t Parser::offset() {
  accept("+");
  return integer();
}

Operand Parser::address() {
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

Operand Parser::list() {
  expect("{");
  Operand o;
  o.kind = Operand::Kind::kList;
  while (!accept("}")) {
    o.parts.push_back(operand());
    if (!is("}")) expect(",");
  }
  return o;
}

Operand Parser::number() {
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
  } else if (const bool hex = text.size() > 1 && (text[1] == 'x' || text[1] == 'X');
             !hex && text.find_first_of(".eE") != std::string::npos) {
    const double value = std::stod(text);
    o.number = static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(negative ? -value : value));
    o.is_double = true;
    take();
  } else {
    o.number = integer();
    if (negative) o.number = -o.number;
  }
  return o;
}

// Returns what a name in a statement stands for. Labels may come later, so they are checked at
// the end of the kernel.
Operand Parser::named(const std::string& name) {
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

bool Parser::has(const std::vector<Variable>& variables, const std::string& name) {
  return std::any_of(variables.begin(), variables.end(),
                     [&](const Variable& v) { return v.name == name; });
}

// Each kernel that names a shared variable of the module has one of its own.
void Parser::take_shared(const std::string& name) {
  if (has(kernel_->shared, name)) return;
  for (const Variable& v : module_->variables) {
    if (v.name == name && v.space == Space::kShared && !v.is_dynamic) place(v);
  }
}

bool Parser::is_variable(const std::string& name) const {
  return has(kernel_->params, name) || has(kernel_->shared, name) || has(kernel_->locals, name) ||
         has(module_->variables, name);
}

}  // namespace ptx_machine
