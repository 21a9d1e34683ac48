// Shapes of a fused tensor-parallel GEMM, and the integer helpers every other core header uses.
//
// Everything in csrc/core is `constexpr`, host-and-device and free of dependencies: the code that a
// GPU thread block runs to find its tile is the code that the CPU backend and the tests run.
#pragma once

#if defined(__CUDACC__)
#define FLUX_HD __host__ __device__
#else
#define FLUX_HD
#endif

namespace flux {

enum class OpKind : int {
  kAGGemm = 0,
  kGemmRS = 1,
  kGemmAR = 2,
  kGemmAllToAll = 3,
  kAllToAllGemm = 4
};

// Written without a + b - 1, which would overflow for a knob as large as INT_MAX.
FLUX_HD constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0 ? 1 : 0); }
FLUX_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }
FLUX_HD constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The largest extent of anything: sums and products of an extent with a neighbouring index stay inside of
// 32 bits, as (tile + 1) * tile_m does.
constexpr int kMaxExtent = 1 << 30;
// The most ranks (building a schedule takes time in the square of them), and the most GEMM tiles or signals
// of a schedule. Counts of tiles are products of two
// extents, so they are taken in 64 bits until they have been compared with this.
constexpr int kMaxRanks = 1 << 10;
constexpr int kMaxTiles = 1 << 22;

// Mathematical modulus: the result is in [0, m) for negative `a` too.
//   wrap(-1, 4) = 3    wrap(4, 4) = 0    wrap(6, 4) = 2
FLUX_HD constexpr int wrap(int a, int m) { return ((a % m) + m) % m; }

// A fused op's *problem*: global sizes, as the user gives them. How it is solved is in the knobs.
//   AGGemm        x [M/W, K]  x  w [N/W, K]  ->  y [M, N/W]
//   GemmRS        x [M, K/W]  x  w [N, K/W]  ->  y [own rows, N]
//   GemmAR        x [M, K/W]  x  w [N, K/W]  ->  y [M, N]
// The two of an all-to-all have blocks in place of chunks (csrc/schedule/exchange.h).
// Whatever is divided by W is divided as rows are (ownership.h), so none has to be a multiple of
// it.
struct Problem {
  OpKind op;
  int m;
  int n;
  int k;
  int world;
};

}  // namespace flux
