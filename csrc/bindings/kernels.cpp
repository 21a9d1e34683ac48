// Binds the arguments of CUDA kernels (cuda/abi.h) and their launch.
#include "cuda_host/kernels.h"

#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "cuda/arguments.h"
#include "cuda/runtime/nvshmem_abi.h"
#include "cuda_host/driver.h"

namespace py = pybind11;

namespace flux::host {
namespace {

// Addresses are integers in Python.
template <class Struct, class Class, class T>
void address(Class& bound, const char* name, T* Struct::* member) {
  bound.def_property(
      name, [member](const Struct& s) { return reinterpret_cast<std::uintptr_t>(s.*member); },
      [member](Struct& s, std::uintptr_t value) { s.*member = reinterpret_cast<T*>(value); });
}

template <class T>
void fill(T* (&slots)[FLUX_MAX_WORLD], const std::vector<std::uintptr_t>& addresses) {
  if (addresses.size() > FLUX_MAX_WORLD) {
    throw std::invalid_argument("a kernel addresses at most " + std::to_string(FLUX_MAX_WORLD) +
                                " ranks, got " + std::to_string(addresses.size()));
  }
  for (std::size_t i = 0; i < FLUX_MAX_WORLD; ++i) {
    slots[i] = i < addresses.size() ? reinterpret_cast<T*>(addresses[i]) : nullptr;
  }
}

// Owns the sequence that its order points to.
struct GemmArgs : FluxGemmArgs {
  GemmArgs() : FluxGemmArgs{} {}
  GemmArgs(const GemmArgs&) = delete;
  std::vector<std::int32_t> sequence;
};

struct ReductionArgs : FluxReduceArgs {
  ReductionArgs() : FluxReduceArgs{} {}
};

void bind_parts(py::module_& m) {
  py::class_<FluxOrder>(m, "KernelOrder")
      .def_readwrite("world", &FluxOrder::world)
      .def_readwrite("rank", &FluxOrder::rank)
      .def_readwrite("order", &FluxOrder::order)
      .def_readwrite("direction", &FluxOrder::direction)
      .def_readwrite("swizzle", &FluxOrder::swizzle)
      .def_readwrite("nodes", &FluxOrder::nodes)
      .def_readwrite("domains", &FluxOrder::domains)
      .def_readwrite("lanes", &FluxOrder::lanes)
      .def_readwrite("raster", &FluxOrder::raster)
      .def_readwrite("comm_tile_rows", &FluxOrder::comm_tile_rows)
      .def_readwrite("column_ranges", &FluxOrder::column_ranges);
  auto sync = py::class_<FluxSync>(m, "KernelSync")
                  .def_readwrite("epoch", &FluxSync::epoch)
                  .def_readwrite("timeout_ns", &FluxSync::timeout_ns);
  address(sync, "status", &FluxSync::status);
  address(sync, "report", &FluxSync::report);
  address(sync, "trace", &FluxSync::trace);
}

void bind_gemm_args(py::module_& m) {
  auto bound = py::class_<GemmArgs>(m, "GemmArgs")
                   .def(py::init<>())
                   .def_readwrite("m", &GemmArgs::m)
                   .def_readwrite("n", &GemmArgs::n)
                   .def_readwrite("k", &GemmArgs::k)
                   .def_readwrite("alpha", &GemmArgs::alpha)
                   .def_readwrite("lda", &GemmArgs::lda)
                   .def_readwrite("ldb", &GemmArgs::ldb)
                   .def_readwrite("ldd", &GemmArgs::ldd)
                   .def_readwrite("order", &GemmArgs::order)
                   .def_readwrite("sync", &GemmArgs::sync)
                   .def_readwrite("slot_ld", &GemmArgs::slot_ld)
                   .def_readwrite("guard_rows", &GemmArgs::guard_rows)
                   .def_readwrite("workspace_bytes", &GemmArgs::workspace_bytes)
                   .def_readwrite("sm_count", &GemmArgs::sm_count)
                   .def_readwrite("waiting", &GemmArgs::waiting)
                   .def_readwrite("device", &GemmArgs::device);
  address<GemmArgs>(bound, "a", static_cast<const void* GemmArgs::*>(&GemmArgs::a));
  address<GemmArgs>(bound, "b", static_cast<const void* GemmArgs::*>(&GemmArgs::b));
  address<GemmArgs>(bound, "d", static_cast<void* GemmArgs::*>(&GemmArgs::d));
  address<GemmArgs>(bound, "bias", static_cast<const void* GemmArgs::*>(&GemmArgs::bias));
  address<GemmArgs>(bound, "scale_a", static_cast<const float* GemmArgs::*>(&GemmArgs::scale_a));
  address<GemmArgs>(bound, "scale_b", static_cast<const float* GemmArgs::*>(&GemmArgs::scale_b));
  address<GemmArgs>(bound, "signals",
                    static_cast<const std::uint32_t* GemmArgs::*>(&GemmArgs::signals));
  address<GemmArgs>(bound, "entries",
                    static_cast<const std::uint32_t* GemmArgs::*>(&GemmArgs::entries));
  address<GemmArgs>(bound, "workspace", static_cast<void* GemmArgs::*>(&GemmArgs::workspace));
  bound
      .def("set_slots",
           [](GemmArgs& a, const std::vector<std::uintptr_t>& slots) { fill(a.slots, slots); })
      .def("set_flags",
           [](GemmArgs& a, const std::vector<std::uintptr_t>& flags) { fill(a.flags, flags); })
      .def("set_sequence",
           [](GemmArgs& a, std::vector<std::int32_t> sequence) {
             a.sequence = std::move(sequence);
             a.order.sequence = a.sequence.empty() ? nullptr : a.sequence.data();
           })
      .def(
          "tile_map",
          [](const GemmArgs& a, int op, int tile_m, int tile_n) {
            return tile_map(tile_order(a, static_cast<OpKind>(op), tile_m, tile_n));
          },
          "The tiles that a kernel with tiles of this size visits, in order.")
      .def("comm_tiling", [](const GemmArgs& a) {
        const CommTiling c = comm_tiling(a);
        return py::make_tuple(c.m, c.world, c.rows);
      });
}

void bind_reduce_args(py::module_& m) {
  auto bound = py::class_<ReductionArgs>(m, "ReduceArgs")
                   .def(py::init<>())
                   .def_readwrite("rows", &ReductionArgs::rows)
                   .def_readwrite("n", &ReductionArgs::n)
                   .def_readwrite("first_row", &ReductionArgs::first_row)
                   .def_readwrite("m", &ReductionArgs::m)
                   .def_readwrite("tile_m", &ReductionArgs::tile_m)
                   .def_readwrite("tile_n", &ReductionArgs::tile_n)
                   .def_readwrite("world", &ReductionArgs::world)
                   .def_readwrite("rank", &ReductionArgs::rank)
                   .def_readwrite("slot_ld", &ReductionArgs::slot_ld)
                   .def_readonly("slot_count", &ReductionArgs::slot_count)
                   .def_readwrite("out_count", &ReductionArgs::out_count)
                   .def_readwrite("out_ld", &ReductionArgs::out_ld)
                   .def_readwrite("scale", &ReductionArgs::scale)
                   .def_readwrite("sm_count", &ReductionArgs::sm_count)
                   .def_readwrite("first_source", &ReductionArgs::first_source)
                   .def_readwrite("source_count", &ReductionArgs::source_count)
                   .def_readwrite("most_blocks", &ReductionArgs::most_blocks)
                   .def_readwrite("early", &ReductionArgs::early)
                   .def_readwrite("sync", &ReductionArgs::sync);
  address<ReductionArgs>(bound, "flags",
                         static_cast<const std::uint32_t* ReductionArgs::*>(&ReductionArgs::flags));
  address<ReductionArgs>(bound, "bias",
                         static_cast<const void* ReductionArgs::*>(&ReductionArgs::bias));
  bound
      .def("set_slots",
           [](ReductionArgs& a, const std::vector<std::uintptr_t>& slots) {
             fill(a.slots, slots);
             a.slot_count = static_cast<std::int32_t>(slots.size());
           })
      .def("set_outs", [](ReductionArgs& a, const std::vector<std::uintptr_t>& outs) {
        fill(a.outs, outs);
        a.out_count = static_cast<std::int32_t>(outs.size());
      });
}

// Streams and addresses are integers in Python, as torch gives them.
void bind_driver(py::module_& m) {
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver",
                                              "The CUDA driver, looked up at run time.")
      .def(py::init<const std::string&>(), py::arg("library") = "libcuda.so.1")
      .def("create_stream", &Driver::create_stream)
      .def("destroy_stream", &Driver::destroy_stream, py::arg("stream"))
      .def("synchronize", &Driver::synchronize, py::arg("stream"), py::call_guard<WithoutGil>())
      .def("ready", &Driver::ready, py::arg("stream"))
      .def("order_after", &Driver::order_after, py::arg("later"), py::arg("earlier"))
      .def("copy", &Driver::copy, py::arg("stream"), py::arg("to"), py::arg("from_"),
           py::arg("bytes"))
      .def("signal", &Driver::signal, py::arg("stream"), py::arg("word"), py::arg("value"))
      .def("await_signal", &Driver::await_signal, py::arg("stream"), py::arg("word"),
           py::arg("value"))
      .def("fill", &Driver::fill, py::arg("stream"), py::arg("words"), py::arg("value"),
           py::arg("count"))
      .def("peer_atomics", &Driver::peer_atomics, py::arg("device"), py::arg("peer"))
      .def("capture", &Driver::capture, py::arg("stream"));
}

}  // namespace

void bind_kernels(py::module_& m) {
  bind_parts(m);
  bind_gemm_args(m);
  bind_reduce_args(m);
  py::class_<Kernel, std::shared_ptr<Kernel>>(m, "Kernel",
                                              "One kernel of a library that flux.kernels built.")
      .def(py::init<const std::string&, const std::string&, const std::string&>(),
           py::arg("library"), py::arg("symbol"), py::arg("file") = "")
      .def_property_readonly("name", &Kernel::name)
      .def_property_readonly("tile",
                             [](const Kernel& k) { return py::make_tuple(k.tile_m(), k.tile_n()); })
      .def_property_readonly("reduces", &Kernel::reduces)
      .def_property_readonly("traces", &Kernel::traces)
      .def("prepare", &Kernel::prepare, py::arg("device"), py::call_guard<WithoutGil>())
      .def("workspace_bytes",
           [](const Kernel& k, const GemmArgs& args) { return k.workspace_bytes(args); })
      .def("launch", [](const Kernel& k, const GemmArgs& args,
                        std::uintptr_t stream) { k.launch(args, stream); })
      .def("reduce", [](const Kernel& k, const ReductionArgs& args, std::uintptr_t stream) {
        k.reduce(args, stream);
      });
  bind_driver(m);
  m.attr("ABI_VERSION") = FLUX_ABI_VERSION;
  m.attr("TRACE_RECORD_BYTES") = static_cast<int>(sizeof(FluxTraceRecord));
  m.attr("TRACE_UNITS") = static_cast<int>(FLUX_TRACE_UNITS);
  m.attr("TRACE_IN_KERNEL") = FLUX_TRACE_IN_KERNEL;
  m.attr("NVSHMEM_ABI") =
      py::make_tuple(FLUX_NVSHMEM_ABI_VERSION, sizeof(FluxRelayArgs), sizeof(FluxNodeSumArgs));
  m.attr("MAX_KERNEL_WORLD") = FLUX_MAX_WORLD;
  m.attr("STATUS_WORDS") = static_cast<int>(FLUX_STATUS_WORDS);
}

}  // namespace flux::host
