// An NVTX library that writes down what ranges it is told of, by thread as NVTX nests them.
#include <string>

namespace {

std::string told;
thread_local int depth = 0;

}  // namespace

extern "C" {

int nvtxRangePushA(const char* name) {
  told += std::string("+") + name + "\n";
  return depth++;
}
int nvtxRangePop() {
  told += depth > 0 ? "-\n" : "a pop too many\n";
  return --depth;
}

// What it was told since the last time.
const char* fake_nvtx_told() {
  static std::string given;
  given.swap(told);
  told.clear();
  return given.c_str();
}
int fake_nvtx_depth() { return depth; }

}  // extern "C"
