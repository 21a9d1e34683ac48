// Parts of flux._C that live in files of their own.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace flux::host {

// Releases the GIL while it lives, as py::gil_scoped_release does. A daemon thread may be inside
// when the interpreter ends: CPython before 3.14 then ends the thread by pthread_exit as it asks for
// the GIL. That unwinds the stack, and a destructor that is unwound through aborts the program. Here
// the thread stops for good instead, as in CPython 3.14, and goes with the process.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding, which must not go on from here
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

// Keeps an object of Python alive for native code, which may let go of it without the GIL. Python's
// garbage collector does not see this reference, so it frees the object behind its last native user.
inline std::shared_ptr<void> keep(pybind11::object object) {
  if (object.is_none()) return nullptr;
  return {object.release().ptr(), [](void* held) {
            const pybind11::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(held));
          }};
}

void bind_core(pybind11::module_& m);         // the maps of csrc/core, as flux._C.core
void bind_schedule(pybind11::module_& m);     // build_schedule and Schedule
void bind_routing(pybind11::module_& m);      // routed rows of grouped ops
void bind_plan(pybind11::module_& m);         // the simulation of steps
void bind_route(pybind11::module_& m);        // the same, on the device
void bind_kernels(pybind11::module_& m);      // CUDA kernels: their arguments and launch
void bind_cuda_op(pybind11::module_& m);      // CudaOp, and the simulated peers of loopback
void bind_nvtx(pybind11::module_& m);         // ranges for profilers
void bind_trace(pybind11::module_& m);        // lanes of a trace
void bind_streams(pybind11::module_& m);      // what streams of a GPU tell a trace
void bind_remote(pybind11::module_& m);       // peers of other nodes
void bind_exclusive(pybind11::module_& m);    // one call of an op at a time
void bind_collectives(pybind11::module_& m);  // collectives of ranks on several hosts

}  // namespace flux::host
