// Tokens of PTX text.
#pragma once

#include <string>
#include <vector>

namespace ptx_machine {

struct Token {
  enum class Kind : char { kWord, kNumber, kString, kMark, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;  // of a word: with its dots, as in "ld.global.b32" or "%tid.x"
  int line = 0;
};

// Splits PTX into tokens; comments are left out. The last token is of kind kEnd.
std::vector<Token> tokens_of(const std::string& text);

}  // namespace ptx_machine
