// Families of statements that few kernels have. Each returns whether it knows the statement.
#pragma once

#include "machine.h"

namespace ptx_machine {

// Hints and policies of caches, breakpoints, reductions of vectors, a stack of the thread's own.
bool decode_uncommon(const Statement& s, Op& op);
// movmatrix; mma.sync of doubles, of bits, and of sparse matrices.
bool decode_products(const Statement& s, Op& op);
// Changes of tensor maps.
bool decode_tensor_map(const Statement& s, Op& op);

// The thread's memory that alloca takes its bytes of: a variable that the parser declares.
constexpr const char* kStack = "%stack";
constexpr std::uint64_t kStackBytes = 16 << 10;

}  // namespace ptx_machine
