#include "lexer.h"

#include <cctype>

#include "module.h"

namespace ptx_machine {
namespace {

bool begins_word(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) {}

  std::vector<Token> run() {
    while (skip_space(), at_ < text_.size()) next();
    tokens_.push_back({Token::Kind::kEnd, "", line_});
    return std::move(tokens_);
  }

 private:
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  void skip_space() {
    for (;;) {
      const char c = peek();
      if (c == '\n') ++line_;
      if (c != '\0' && std::isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else if (c == '/' && peek(1) == '/') {
        while (peek() != '\n' && peek() != '\0') ++at_;
      } else if (c == '/' && peek(1) == '*') {
        const auto end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) fail("a comment does not end");
        for (; at_ < end + 2; ++at_) line_ += text_[at_] == '\n';
      } else {
        return;
      }
    }
  }

  void next() {
    const char c = peek();
    if (c == '"') {
      string();
    } else if (std::isdigit(static_cast<unsigned char>(c))) {
      number();
    } else if (begins_word(c)) {
      word();
    } else {
      add(Token::Kind::kMark, at_, at_ + 1);
    }
  }

  static bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

  // 12, 0x1F, 0f3F800000, 1.5, 2., 1e-3
  void number() {
    auto end = at_;
    const auto skip_digits = [&] {
      while (end < text_.size() && is_digit(text_[end])) ++end;
    };
    const auto at = [&](std::size_t i) { return i < text_.size() ? text_[i] : '\0'; };
    skip_digits();
    const bool plain = std::isalpha(static_cast<unsigned char>(at(end))) == 0;
    const bool has_point = at(end) == '.' && !begins_word(at(end + 1));
    if (has_point) {
      ++end;
      skip_digits();
    }
    const bool has_sign = at(end + 1) == '-' || at(end + 1) == '+';
    const bool has_exponent =
        (at(end) == 'e' || at(end) == 'E') && is_digit(at(end + (has_sign ? 2 : 1)));
    if (has_exponent) {
      end += has_sign ? 2 : 1;
      skip_digits();
    }
    if (plain || has_point || has_exponent) return add(Token::Kind::kNumber, at_, end);
    take(Token::Kind::kNumber,
         [](char d) { return std::isalnum(static_cast<unsigned char>(d)) != 0; });
  }

  void string() {
    const auto end = text_.find('"', at_ + 1);
    if (end == std::string::npos) fail("a string does not end");
    const auto begin = at_ + 1;
    add(Token::Kind::kString, begin, end);
    at_ = end + 1;
  }

  // A word goes on over "::" (shared::cta), but not over the ":" behind a label. Directives that are
  // written together, as in ".reg.b32", are words each.
  void word() {
    auto end = at_;
    for (;; ++end) {
      const char c = end < text_.size() ? text_[end] : '\0';
      if (c == '.' && end > at_ && text_[at_] == '.') break;
      if (begins_word(c) || std::isdigit(static_cast<unsigned char>(c))) continue;
      if (c == ':' && end + 1 < text_.size() && text_[end + 1] == ':') {
        ++end;
        continue;
      }
      break;
    }
    add(Token::Kind::kWord, at_, end);
  }

  template <class Belongs>
  void take(Token::Kind kind, Belongs&& belongs) {
    auto end = at_;
    while (end < text_.size() && belongs(text_[end])) ++end;
    add(kind, at_, end);
  }

  void add(Token::Kind kind, std::size_t begin, std::size_t end) {
    tokens_.push_back({kind, text_.substr(begin, end - begin), line_});
    at_ = end;
  }

  [[noreturn]] void fail(const char* why) const {
    throw PtxError("PTX line " + std::to_string(line_) + ": " + why);
  }

  const std::string& text_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<Token> tokens_of(const std::string& text) { return Lexer(text).run(); }

}  // namespace ptx_machine
