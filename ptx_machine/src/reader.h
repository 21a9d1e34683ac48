// The tokens of a PTX text, one after the other, and errors that name the line.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "lexer.h"
#include "module.h"

namespace ptx_machine {

class Reader {
 public:
  Reader(const std::string& text, const std::vector<std::string>& lines)
      : tokens_(tokens_of(text)), lines_(lines) {}

 protected:
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
    if (line >= 1 && line <= static_cast<int>(lines_.size())) {
      text += "\n  " + lines_[line - 1];
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

  std::vector<Token> tokens_;
  std::size_t at_ = 0;

 private:
  const std::vector<std::string>& lines_;
};

}  // namespace ptx_machine
