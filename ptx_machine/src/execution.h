// The execution of a launch (execution.cpp), which Machine::launch has checked.
#pragma once

#include "machine.h"

namespace ptx_machine {

// Runs all blocks of a launch to their end. Throws PtxError.
Counters execute(Machine& machine, const Program& program, const Launch& launch);

}  // namespace ptx_machine
