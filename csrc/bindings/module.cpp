// The Python interface of the native code: flux._C. No PyTorch headers: tensors arrive as addresses
// and sizes.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "bindings/bindings.h"
#include "cpu/engine.h"
#include "cpu/shared_mapping.h"

namespace py = pybind11;

namespace flux::host {
namespace {

using Seconds = std::chrono::duration<double>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Runs an engine wait without the GIL. Takes the GIL now and then so that Ctrl-C works. Returns
// true when done, false when the engine has failed.
template <class Wait>
bool wait_interruptibly(Engine& engine, double timeout_s, double spin_s, Wait&& wait) {
  const auto spin = std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(spin_s));
  auto now = Clock::now();
  const auto deadline =
      now + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(timeout_s));
  for (;;) {
    {
      const WithoutGil release;
      if (wait(Limit{now + std::chrono::milliseconds(50), deadline, spin})) return true;
    }
    if (engine.failed()) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    now = Clock::now();
  }
}

std::unique_ptr<Engine> make_engine(int rank, const std::vector<std::uintptr_t>& pads,
                                    const std::vector<std::uintptr_t>& data,
                                    std::vector<bool> remote, std::size_t row_bytes,
                                    std::size_t slot_bytes, std::size_t result_offset,
                                    std::size_t data_bytes, int dtype, int signals,
                                    std::shared_ptr<Processes> processes, py::object memory) {
  Symmetric symmetric;
  for (const auto p : pads) symmetric.pads.push_back(pointer<SignalPad>(p));
  for (const auto p : data) symmetric.data.push_back(pointer<char>(p));
  symmetric.remote = std::move(remote);
  symmetric.row_bytes = row_bytes;
  symmetric.slot_bytes = slot_bytes;
  symmetric.result_offset = result_offset;
  symmetric.data_bytes = data_bytes;
  symmetric.dtype = static_cast<DType>(dtype);
  symmetric.signals = signals;
  symmetric.processes = std::move(processes);
  symmetric.memory = keep(std::move(memory));
  return std::make_unique<Engine>(rank, std::move(symmetric));
}

void begin(Engine& engine, std::shared_ptr<Schedule> schedule, std::uint32_t digest, bool threaded,
           double timeout_s, std::uintptr_t x, std::size_t x_stride, std::uintptr_t partial,
           std::uintptr_t out, std::uintptr_t bias, double scale,
           std::shared_ptr<Selection> selection) {
  const Buffers buffers{
      pointer<const char>(x),    x_stride, pointer<char>(partial), pointer<char>(out),
      pointer<const char>(bias), scale,    std::move(selection)};
  engine.begin(std::move(schedule), buffers, digest, threaded,
               std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(timeout_s)));
}

constexpr const char* kFailureNames[] = {"none",        "timeout", "mismatch", "peer_failed",
                                         "peer_closed", "ended",   "peer_died"};

py::dict failure(Engine& engine) {
  const FailureReport& f = engine.failure();
  py::dict d;
  d["kind"] = kFailureNames[static_cast<int>(f.kind)];
  d["peer"] = f.peer;
  d["chunk"] = f.chunk;
  d["tile"] = f.tile;
  d["culprit"] = f.culprit;
  d["expected"] = f.expected;
  d["observed"] = f.observed;
  d["ran_ahead"] = f.ran_ahead;
  d["refusal"] = f.kind == Failure::kMismatch && f.observed == kRefused
                     ? read_refusal(engine.pad(f.peer))
                     : std::string();
  return d;
}

void bind_engine(py::module_& m) {
  py::class_<Engine>(m, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("rank"), py::arg("pads"), py::arg("data"),
           py::arg("remote"), py::arg("row_bytes"), py::arg("slot_bytes"), py::arg("result_offset"),
           py::arg("data_bytes"), py::arg("dtype"), py::arg("signals"),
           py::arg("processes") = nullptr, py::arg("memory") = py::none())
      .def("begin", &begin, py::arg("schedule"), py::arg("digest"), py::arg("threaded"),
           py::arg("timeout_s"), py::arg("x") = 0, py::arg("x_stride") = 0, py::arg("partial") = 0,
           py::arg("out") = 0, py::arg("bias") = 0, py::arg("scale") = 1.0,
           py::arg("selection") = nullptr)
      .def("require_room", &Engine::require_room, py::arg("schedule"))
      .def("skip", &Engine::skip)
      .def("refuse", &Engine::refuse, py::arg("why"))
      .def("wait_entries",
           [](Engine& e, double timeout_s, double spin_s) {
             return wait_interruptibly(e, timeout_s, spin_s,
                                       [&](const Limit& limit) { return e.wait_entries(limit); });
           })
      .def("wait_visit",
           [](Engine& e, int visit, double timeout_s, double spin_s) {
             return wait_interruptibly(e, timeout_s, spin_s, [&](const Limit& limit) {
               return e.wait_visit(visit, limit);
             });
           })
      .def("finish",
           [](Engine& e, double timeout_s, double spin_s) {
             return wait_interruptibly(e, timeout_s, spin_s,
                                       [&](const Limit& limit) { return e.finish(limit); });
           })
      .def("fate",
           [](Engine& e, int peer) {
             return std::make_pair(kFailureNames[static_cast<int>(e.fate(peer))],
                                   e.pad(peer).culprit.load(std::memory_order_relaxed));
           })
      .def("look", &Engine::look)
      .def("looks", &Engine::looks, py::arg("peer"))
      .def("visit_done", &Engine::visit_done, py::arg("visit"))
      .def("end_call", &Engine::end_call)
      .def("settle", &Engine::settle, py::call_guard<WithoutGil>())
      .def("await_parcel", &Engine::await_parcel, py::arg("peer"), py::arg("signal"),
           py::arg("epoch"), py::call_guard<WithoutGil>())
      .def("await_agreement", &Engine::await_agreement, py::arg("epoch"),
           py::call_guard<WithoutGil>())
      .def("announce", &Engine::announce, py::arg("signal"), py::arg("epoch"))
      .def("peer_entered", &Engine::peer_entered, py::arg("peer"), py::arg("epoch"),
           py::arg("digest"))
      .def("peer_refused", &Engine::peer_refused, py::arg("peer"), py::arg("epoch"), py::arg("why"))
      .def(
          "peer_left",
          [](Engine& e, int peer, bool failed, int culprit) {
            e.peer_left(peer, failed ? PadState::kFailed : PadState::kClosed, culprit);
          },
          py::arg("peer"), py::arg("failed"), py::arg("culprit") = -1)
      .def("failure", &failure)
      .def(
          "close",
          [](Engine& e, bool failed, int culprit) {
            e.close(failed ? PadState::kFailed : PadState::kClosed, culprit);
          },
          py::arg("failed") = false, py::arg("culprit") = -1, py::call_guard<WithoutGil>())
      .def(
          "set_delay",
          [](Engine& e, double longest_s, std::uint64_t seed) {
            e.set_delay(std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(longest_s)),
                        seed);
          },
          py::arg("longest_s"), py::arg("seed"))
      .def(
          "trace", [](Engine& e, Lane* caller, Lane* worker) { e.trace(Lanes{caller, worker}); },
          py::arg("caller") = nullptr, py::arg("worker") = nullptr)
      .def_property("epoch", &Engine::epoch, &Engine::set_epoch);
}

void bind_memory(py::module_& m) {
  py::class_<SharedMapping>(m, "SharedMapping", py::buffer_protocol())
      .def(py::init<int, std::size_t>(), py::arg("descriptor"), py::arg("bytes"))
      .def_property_readonly(
          "address", [](SharedMapping& s) { return reinterpret_cast<std::uintptr_t>(s.address()); })
      .def_property_readonly("nbytes", &SharedMapping::bytes)
      .def_buffer([](SharedMapping& s) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(s.address()),
                               static_cast<py::ssize_t>(s.bytes()));
      });
  py::class_<Processes, std::shared_ptr<Processes>>(m, "Processes")
      .def(py::init<std::vector<pid_t>>(), py::arg("pids"))
      .def("ended", &Processes::ended, py::arg("rank"))
      .def("close", &Processes::close)
      .def_property_readonly("pids", &Processes::pids);
  m.def("pad_bytes", &SignalPad::bytes, py::arg("signal_count"));
  m.attr("LAYOUT_NUMBER") = kLayoutNumber;
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      errno = e.code().value();
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.what());
    }
  });
}

void bind_reduce(py::module_& m) {
  m.def(
      "reduce",
      [](int dtype, const std::vector<std::uintptr_t>& sources, std::uintptr_t out,
         std::uintptr_t bias, std::size_t rows, std::size_t columns, double scale) {
        std::vector<const void*> blocks;
        for (const auto s : sources) blocks.push_back(pointer<const void>(s));
        const WithoutGil release;
        reduce(ReduceArgs{static_cast<DType>(dtype), blocks.data(), static_cast<int>(blocks.size()),
                          pointer<void>(out), pointer<const void>(bias), rows * columns, columns,
                          scale});
      },
      py::arg("dtype"), py::arg("sources"), py::arg("out"), py::arg("bias"), py::arg("rows"),
      py::arg("columns"), py::arg("scale") = 1.0);
}

}  // namespace
}  // namespace flux::host

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of flux: tile schedules, signals and the copy engine of the CPU backend.";
  flux::host::bind_core(m);
  flux::host::bind_exclusive(m);
  flux::host::bind_schedule(m);
  flux::host::bind_routing(m);
  flux::host::bind_plan(m);
  flux::host::bind_route(m);
  flux::host::bind_trace(m);
  flux::host::bind_memory(m);
  flux::host::bind_engine(m);
  flux::host::bind_reduce(m);
  flux::host::bind_collectives(m);
  flux::host::bind_kernels(m);
  flux::host::bind_streams(m);
  flux::host::bind_remote(m);
  flux::host::bind_cuda_op(m);
  flux::host::bind_nvtx(m);
}
