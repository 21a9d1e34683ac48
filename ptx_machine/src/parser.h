// The parser of PTX text: each function takes from the tokens what it is called after.
#pragma once

#include <map>

#include "reader.h"

namespace ptx_machine {

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
  // parser.cpp: declarations
  void top_level();
  void file();
  void section();
  Space space_of(const std::string& name);
  std::vector<Variable> declaration(Space space, bool is_extern);
  void initial_value(Variable& v, int element);

  // functions
  void find_functions();
  void skip_to(const char* end);
  void skip_list();
  void function();
  void bind(const std::vector<Operand>& given);
  void insert(const Statement& call, const std::vector<Operand>& results, const std::string& name,
              const std::vector<Operand>& arguments);
  void leave_function(const Statement& like, bool otherwise = false);

  // kernels, and what their bodies consist of
  void entry();
  void params();
  void attribute();
  void body();
  void resolve_labels(std::size_t first, const std::map<std::string, int>& labels);
  void line_of_body();
  void targets(const std::string& list);
  void location();
  void registers();
  void add_register(const std::string& name, Type type);
  void place(Variable v);
  void place_argument(Variable v);

  // parser_statements.cpp: statements and operands
  void statement();
  void branch_by_number(Statement s);
  void compare_into_register(Statement s);
  std::int64_t value_of_true(const std::string& type, bool pair) const;
  static std::string bits_like(const std::string& type);
  void choose_by_sign(Statement s);
  void choose(const Statement& like, const std::string& type, const Operand& target,
              const Operand& yes, const Operand& no, const Operand& which);
  Operand new_register(Type type);
  Operand new_predicate();
  static Operand constant(std::int64_t value);
  static Operand label(const std::string& name);
  void call(Statement s);
  Operand operand();
  std::int64_t offset();
  Operand address();
  Operand list();
  Operand number();
  Operand named(const std::string& name);
  static bool has(const std::vector<Variable>& variables, const std::string& name);
  void take_shared(const std::string& name);
  bool is_variable(const std::string& name) const;

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

}  // namespace ptx_machine
