// Parts of flux._C that live in files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace flux::host {

void bind_core(pybind11::module_& m);      // the maps of csrc/core, as flux._C.core
void bind_schedule(pybind11::module_& m);  // build_schedule and Schedule
void bind_kernels(pybind11::module_& m);   // CUDA kernels: their arguments and launch
void bind_cuda_op(pybind11::module_& m);   // CudaOp, and the part of peers that are played
void bind_nvtx(pybind11::module_& m);      // ranges for profilers
void bind_trace(pybind11::module_& m);     // lanes of a trace
void bind_streams(pybind11::module_& m);   // what streams of a GPU tell a trace
void bind_remote(pybind11::module_& m);    // peers of other nodes

}  // namespace flux::host
