// The execution of a launch (execution.cpp), which Machine::launch has checked.
#pragma once

#include "machine.h"

namespace ptx_machine {

// Returns how many blocks a cluster has, as the launch or the kernel says, or one. Throws PtxError.
Dim cluster_of(const Kernel& kernel, const Launch& launch);
// Runs all blocks of a launch to their end. Throws PtxError.
Counters execute(Machine& machine, const Program& program, const Launch& launch);

}  // namespace ptx_machine
