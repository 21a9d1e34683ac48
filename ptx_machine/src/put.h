// Puts of kernels to other ranks: what the machine and the emulated NVSHMEM (ptx_machine/nvshmem) share.
#pragma once

#include "cudart/ptx_machine_cuda.h"
#include "machine.h"

namespace ptx_machine {

// Makes puts go to this one from now on.
void attach_nic(const PtxMachineNic* nic);

// emulated_nvshmem_put_signal(to, from, bytes, word, value, rank), which
// nvshmemx_putmem_signal_nbi_block of ptx_machine/nvshmem/include calls.
Outcome put_signal(Context& c, const Op& op, Mask mask);

}  // namespace ptx_machine
