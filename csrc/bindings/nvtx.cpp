// Binds ranges for profilers.
#include "cuda_host/nvtx.h"

#include <memory>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace flux::host {
namespace {

// The range of a call that Python makes in several steps.
struct CallSpan {
  std::string op;
  int m;
  std::unique_ptr<Span> span;
};

}  // namespace

void bind_nvtx(py::module_& m) {
  m.def("load_nvtx", &load_nvtx, py::arg("library"));
  py::class_<CallSpan>(m, "CallSpan", "An NVTX range around a call of an op.")
      .def(py::init([](std::string op, int m) { return CallSpan{std::move(op), m, nullptr}; }),
           py::arg("op"), py::arg("m"))
      .def("__enter__",
           [](CallSpan& self) { self.span = std::make_unique<Span>(self.op.c_str(), self.m); })
      .def("__exit__", [](CallSpan& self, const py::args&) { self.span.reset(); });
}

}  // namespace flux::host
