// What bulk copies of bytes and of tensors have in common.
#pragma once

#include <vector>

#include "engine.h"

namespace ptx_machine {

// Returns the object that counts a transfer's bytes. It lies in the block that the bytes go to.
Place mbarrier_of(Context& c, const Op& op, int number, Mask mask, int lane, const Place& target);

// Returns the blocks that a mask of .multicast::cluster names, or that of the target if there is none.
std::vector<Block*> receivers(Context& c, const Op& op, int lane, const Place& target,
                              const Lanes* masks);

// Puts a transfer into the bulk group that its thread has not committed yet.
void join_group(Context& c, int lane, Transfer& transfer);

}  // namespace ptx_machine
