// What warps keep about wgmma: products in flight, and what registers they own.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "formats.h"
#include "machine.h"

namespace ptx_machine {

// A decoded statement of wgmma.
struct MatrixOp {
  enum class Kind : std::uint8_t { kMultiply, kFence, kCommit, kWait };
  Kind kind = Kind::kMultiply;
  int n = 0, k = 0;  // of m64nNkK
  Format a = Format::kNone, b = Format::kNone;
  Type d = Type::kNone;
  bool from_registers = false;  // A
  bool negates = false;         // one of A and B, but not both, is scaled by -1
  bool is_m_major = false;      // A in shared memory
  bool is_n_major = false;      // B
  bool saturates = false;
};

// A wgmma.mma_async that was executed, and may not have been performed.
struct Product {
  const Op* op = nullptr;
  std::uint64_t a = 0, b = 0;  // descriptors
  bool adds = false;           // to D, else D = A B
  std::uint64_t number = 0;    // of the warp's products, from 1
};

// What a register of a warp has to do with products. Numbers are those of Product.
struct RegisterUse {
  std::uint64_t accumulates = 0;  // last product that has it in D
  std::uint64_t is_read = 0;      // last product that has it in A
  std::uint64_t epoch = 0;        // fences before the last access by another instruction
  std::uint64_t epoch_of_d = 0;   // fences before the last product that has it in D
  const Op* by = nullptr;         // last product
};

struct WarpMatrices {
  Storage<RegisterUse> registers;
  std::uint64_t epoch = 0;           // fences so far
  std::uint64_t executed = 0;        // products
  std::uint64_t waited_for = 0;      // products up to this one
  std::uint64_t performed = 0;       // products up to this one
  std::deque<Product> left;          // not performed, oldest first
  std::deque<std::uint64_t> groups;  // committed: last product of each, oldest first
  std::uint64_t statements = 0;      // of wgmma, that the warp has executed
  std::uint64_t random = 0;          // state; 0: products are performed when they are waited for
};

// Statements of wgmma that some warps of a warpgroup have executed, and others have not.
struct WarpgroupLog {
  struct Entry {
    const Op* op;
    std::uint64_t a, b;
    bool adds;
    int first_warp;
    int warps;  // that have executed it
  };
  std::uint64_t begin = 0;  // statements that all have executed
  std::deque<Entry> entries;
};

// Notes what the warp's share of a product reads of shared memory. Throws PtxError.
void note_operands(Context& c, const Product& product);
// Multiplies the warp's 16 rows. Throws PtxError for addresses outside of shared memory.
void perform(Context& c, const Product& product);

}  // namespace ptx_machine
