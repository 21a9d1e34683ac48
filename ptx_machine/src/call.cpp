// Calls of functions without a body: printf, a failed assertion, and puts of the emulated NVSHMEM.
#include "call.h"

#include <algorithm>
#include <cstdio>

#include "put.h"

namespace ptx_machine {
namespace {

std::string text_at(Context& c, const Op& op, int lane, std::uint64_t address) {
  std::string text;
  while (const char one = load_for_call<char>(c, op, lane, address++)) text += one;
  return text;
}

template <class T>
std::string printed(const std::string& format, T value) {
  const int size = std::snprintf(nullptr, 0, format.c_str(), value);
  std::string text(static_cast<std::size_t>(std::max(size, 0)) + 1, '\0');
  std::snprintf(text.data(), text.size(), format.c_str(), value);
  text.pop_back();
  return text;
}

// Values behind each other, each aligned to its size, as the compiler passes them to vprintf.
class Values {
 public:
  Values(Context& c, const Op& op, int lane, std::uint64_t address)
      : c_(c), op_(op), lane_(lane), address_(address) {}

  template <class T>
  T next() {
    address_ = (address_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    const T value = load_for_call<T>(c_, op_, lane_, address_);
    address_ += sizeof(T);
    return value;
  }

  // The text of one conversion, such as %5.2f.
  std::string convert(const std::string& format) {
    const bool is_long = format.find_first_of("lzjt") != std::string::npos;
    switch (format.back()) {
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o':
      case 'c':
        return is_long ? printed(format, next<long long>()) : printed(format, next<int>());
      case 's':
        return printed(format, text_at(c_, op_, lane_, next<std::uint64_t>()).c_str());
      case 'p':
        return printed(format, reinterpret_cast<void*>(next<std::uint64_t>()));
      case '%':
        return "%";
      default:
        return printed(format, next<double>());
    }
  }

 private:
  Context& c_;
  const Op& op_;
  int lane_;
  std::uint64_t address_;
};

// Returns the number of the conversions, as a device does.
Outcome print(Context& c, const Op& op, Mask mask) {
  each(mask, [&](int lane) {
    const std::string format =
        text_at(c, op, lane, argument_of_call<std::uint64_t>(c, op, lane, 2));
    Values values(c, op, lane, argument_of_call<std::uint64_t>(c, op, lane, 3));
    std::string text;
    std::uint32_t conversions = 0;
    for (std::size_t i = 0; i < format.size();) {
      const std::size_t end =
          format[i] == '%' ? format.find_first_of("diuxXocspfFeEgGaA%", i + 1) : std::string::npos;
      if (end == std::string::npos) {
        text += format[i++];
        continue;
      }
      text += values.convert(format.substr(i, end + 1 - i));
      conversions += format[end] != '%';
      i = end + 1;
    }
    std::fwrite(text.data(), 1, text.size(), stdout);
    const std::uint64_t result = read(c, op, 0, Mask{1} << lane)[lane];
    std::memcpy(at(c, op, lane, Space::kGeneric, result, 4), &conversions, 4);
  });
  std::fflush(stdout);
  return Outcome::kNext;
}

// __assertfail(message, file, line, function, size of a character)
Outcome fail_assertion(Context& c, const Op& op, Mask mask) {
  const int lane = std::countr_zero(mask);
  const auto text = [&](int number) {
    return text_at(c, op, lane, argument_of_call<std::uint64_t>(c, op, lane, number));
  };
  const auto line = argument_of_call<std::uint32_t>(c, op, lane, 3);
  c.fail(op, lane,
         "assertion " + text(1) + " failed in " + text(4) + ", " + text(2) + ":" +
             std::to_string(line));
}

}  // namespace

bool decode_call(const Statement& s, Op& op) {
  if (s.opcode[0] != "call" || !has_only(s, " uni ")) return false;
  const std::string& name = s.operands[1].name;
  const std::size_t results = s.operands[0].parts.size(), arguments = s.operands[2].parts.size();
  op.written = 0;
  if (name == "vprintf" && results == 1 && arguments == 2) op.handler = print;
  if (name == "__assertfail" && results == 0 && arguments == 5) op.handler = fail_assertion;
  if (name == "emulated_nvshmem_put_signal" && results == 0 && arguments == 6) {
    op.handler = put_signal;
  }
  return op.handler != nullptr;
}

}  // namespace ptx_machine
