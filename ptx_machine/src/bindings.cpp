#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.h"
#include "tensor_map.h"
#include "trace.h"

namespace py = pybind11;

namespace ptx_machine {
namespace {

using Triple = std::array<std::uint32_t, 3>;

template <class T>
py::bytes bytes_of_all(const std::vector<T>& all) {
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(T)};
}

// Tallies are the bytes of their fields, which ptx_machine/counters.py reads when it needs them.
py::dict as_dict(const Counters& counters) {
  py::dict found;
  found["statements"] = counters.statements;
  found["instructions"] = counters.instructions;
  found["blocks"] = counters.blocks;
  py::list warps;
  for (const std::vector<Tally>& tallies : counters.warps) warps.append(bytes_of_all(tallies));
  found["warps"] = warps;
  return found;
}

// Statements and instructions by name of a kernel, which several libraries may have.
std::map<std::string, std::map<std::string, std::uint64_t>> counters_of(CudaDevice& device) {
  std::map<std::string, std::map<std::string, std::uint64_t>> found;
  for (const CudaDevice::Record& record : device.counters()) {
    found[record.kernel]["statements"] += record.counters.statements;
    found[record.kernel]["instructions"] += record.counters.instructions;
    found[record.kernel]["nanoseconds"] += record.nanoseconds;
  }
  return found;
}

py::list records_of(CudaDevice& device) {
  py::list found;
  for (const CudaDevice::Record& record : device.counters()) {
    py::dict one = as_dict(record.counters);
    one["module"] = std::const_pointer_cast<Module>(record.module);
    one["kernel"] = record.kernel;
    one["launches"] = record.launches;
    found.append(one);
  }
  return found;
}

// Addresses of functions of whatever emulates the driver.
void attach(CudaDevice& device, std::uintptr_t run, std::uintptr_t create, std::uintptr_t destroy,
            std::uintptr_t synchronize, std::uintptr_t fail) {
  CudaDevice::Streams streams;
  streams.run = reinterpret_cast<CudaDevice::RunOnStream*>(run);
  streams.create = reinterpret_cast<decltype(streams.create)>(create);
  streams.destroy = reinterpret_cast<decltype(streams.destroy)>(destroy);
  streams.synchronize = reinterpret_cast<decltype(streams.synchronize)>(synchronize);
  device.attach(streams, reinterpret_cast<CudaDevice::FailDevice*>(fail));
}

void attach_early(CudaDevice& device, std::uintptr_t run, std::uintptr_t release_next,
                  std::uintptr_t predecessor_ended) {
  device.attach_early(reinterpret_cast<CudaDevice::RunOnStream*>(run),
                      reinterpret_cast<CudaDevice::ReleaseNext*>(release_next),
                      reinterpret_cast<CudaDevice::PredecessorEnded*>(predecessor_ended));
}

Vectors vectors_named(const std::string& name) {
  if (name == "apart") return Vectors::kApart;
  if (name == "whole") return Vectors::kWhole;
  if (name == "reported") return Vectors::kReported;
  throw py::value_error("vectors are \"apart\", \"whole\" or \"reported\", not " + name);
}

py::dict launch(Machine& machine, const std::shared_ptr<Module>& module, const std::string& kernel,
                const Triple& grid, const Triple& block, const py::bytes& params,
                std::uint64_t dynamic_shared, std::uint64_t seed, std::uint64_t max_statements,
                const std::optional<Triple>& cluster, bool races, std::uint32_t device,
                std::uint64_t most_events, bool peer_reductions, const std::string& vectors) {
  Launch request;
  request.grid = {grid[0], grid[1], grid[2]};
  request.block = {block[0], block[1], block[2]};
  if (cluster) request.cluster = Dim{(*cluster)[0], (*cluster)[1], (*cluster)[2]};
  const std::string bytes = params;
  request.params.assign(bytes.begin(), bytes.end());
  request.dynamic_shared = dynamic_shared;
  request.seed = seed;
  request.max_statements = max_statements;
  request.races = races;
  request.device = device;
  request.peer_reductions = peer_reductions;
  request.vectors = vectors_named(vectors);
  Events events;
  events.most = most_events;
  if (most_events != 0) request.events = &events;
  Counters counters;
  {
    const py::gil_scoped_release release;
    counters = machine.launch(module, kernel, request);
  }
  py::dict found = as_dict(counters);
  if (most_events == 0) return found;
  found["events"] = bytes_of_all(events.all);
  found["dropped"] = events.dropped;
  py::list blocks;
  for (const Dim& b : events.blocks) blocks.append(py::make_tuple(b.x, b.y, b.z));
  found["blocks_started"] = blocks;
  return found;
}

py::list params_of(const Module& module, const std::string& name) {
  py::list found;
  for (const Variable& v : module.kernel(name).params) {
    found.append(py::make_tuple(v.offset, v.bytes));
  }
  return found;
}

// Returns (opcode, line of the PTX, source file, source line) of each statement of a kernel.
py::list statements_of(const Module& module, const std::string& name) {
  py::list found;
  for (const Statement& s : module.kernel(name).statements) {
    std::string opcode;
    for (const std::string& part : s.opcode) opcode += (opcode.empty() ? "" : ".") + part;
    const auto file = module.files.find(s.source.file);
    found.append(py::make_tuple(opcode, s.line, file == module.files.end() ? "" : file->second,
                                s.source.line));
  }
  return found;
}

void configure(Machine& machine, const std::string& model, int multiprocessors) {
  machine.room().configure(model_named(model), multiprocessors);
}

// What a block of a kernel takes, and how many of them a multiprocessor holds.
py::dict occupancy(Machine& machine, const std::shared_ptr<Module>& module,
                   const std::string& kernel, std::uint64_t threads, std::uint64_t dynamic_shared) {
  const Program& program = machine.program(module, kernel);
  const DeviceModel& model = machine.room().model();
  const Footprint block = footprint(model, program, threads, dynamic_shared);
  py::dict found;
  found["registers_per_thread"] = registers_of_thread(program, threads);
  found["threads"] = block.threads;
  found["registers"] = block.registers;
  found["shared"] = block.shared;
  found["blocks"] = blocks_that_fit(model, block);
  return found;
}

// Returns the 128 bytes of a map; raises ValueError where the driver would refuse it.
py::bytes tensor_map(int type, std::uintptr_t address, const std::vector<std::uint64_t>& sizes,
                     const std::vector<std::uint64_t>& strides, const std::vector<unsigned>& box,
                     const std::vector<unsigned>& steps, int interleave, int swizzle, int fill) {
  if (box.size() != sizes.size() || steps.size() != sizes.size() ||
      strides.size() + 1 != sizes.size()) {
    throw py::value_error("a tensor map needs a box, steps and strides of all dimensions");
  }
  alignas(64) char bytes[128];
  std::string why;
  const TensorMapRequest request{type,
                                 static_cast<unsigned>(sizes.size()),
                                 reinterpret_cast<const void*>(address),
                                 sizes.data(),
                                 strides.data(),
                                 box.data(),
                                 steps.data(),
                                 interleave,
                                 swizzle,
                                 0,
                                 fill};
  if (encode_tiled(bytes, request, &why) != 0) throw py::value_error(why);
  return py::bytes(bytes, sizeof(bytes));
}

std::vector<std::string> kernels_of(const Module& module) {
  std::vector<std::string> names;
  for (const auto& kernel : module.kernels) names.push_back(kernel->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_machine, m) {
  py::register_exception<PtxError>(m, "PtxError", PyExc_RuntimeError);
  py::class_<Module, std::shared_ptr<Module>>(m, "Module")
      .def(py::init([](const std::string& text) { return std::shared_ptr<Module>(parse(text)); }),
           py::arg("text"))
      .def_readonly("target", &Module::target)
      .def_property_readonly("kernels", &kernels_of)
      .def("params", &params_of, py::arg("kernel"))
      .def("statements", &statements_of, py::arg("kernel"))
      .def_property_readonly("lines", [](const Module& module) { return module.lines; });
  m.def("tensor_map", &tensor_map, py::arg("type"), py::arg("address"), py::arg("sizes"),
        py::arg("strides"), py::arg("box"), py::arg("steps"), py::arg("interleave"),
        py::arg("swizzle"), py::arg("fill"));
  py::class_<Machine>(m, "Machine")
      .def(py::init<>())
      .def("add_memory", &Machine::add_memory, py::arg("address"), py::arg("bytes"),
           py::arg("name"), py::arg("written") = true)
      .def("remove_memory", &Machine::remove_memory, py::arg("address"))
      .def("add_multicast", &Machine::add_multicast, py::arg("address"), py::arg("bytes"),
           py::arg("members"))
      .def("launch", &launch, py::arg("module"), py::arg("kernel"), py::arg("grid"),
           py::arg("block"), py::arg("params"), py::arg("dynamic_shared") = 0, py::arg("seed") = 0,
           py::arg("max_statements") = 1'000'000'000, py::arg("cluster") = py::none(),
           py::arg("races") = true, py::arg("device") = 0, py::arg("most_events") = 0,
           py::arg("peer_reductions") = false, py::arg("vectors") = "apart")
      .def("configure", &configure, py::arg("model"), py::arg("multiprocessors"))
      .def("occupancy", &occupancy, py::arg("module"), py::arg("kernel"), py::arg("threads"),
           py::arg("dynamic_shared") = 0)
      .def_property(
          "patience", [](Machine& m) { return m.room().patience; },
          [](Machine& m, double seconds) { m.room().patience = seconds; })
      .def_property(
          "idle_patience", [](Machine& m) { return m.room().idle_patience; },
          [](Machine& m, double seconds) { m.room().idle_patience = seconds; })
      .def_property_readonly("modules", &Machine::modules)
      .def_property_readonly("blocks_running", [](Machine& m) { return m.room().running(); })
      .def_property_readonly("model", [](Machine& m) { return m.room().model().name; })
      .def_property_readonly("multiprocessors",
                             [](Machine& m) { return m.room().multiprocessors(); });
  m.def("multiprocessors_of",
        [](const std::string& model) { return model_named(model).multiprocessors; });
  py::class_<CudaDevice, std::unique_ptr<CudaDevice, py::nodelete>>(m, "CudaDevice")
      .def_static("instance", &CudaDevice::instance, py::return_value_policy::reference)
      .def("attach", &attach, py::arg("run"), py::arg("create"), py::arg("destroy"),
           py::arg("synchronize"), py::arg("fail"))
      .def("attach_turns",
           [](CudaDevice& device, std::uintptr_t yield_turn) {
             device.attach_turns(reinterpret_cast<CudaDevice::YieldTurn*>(yield_turn));
           })
      .def("attach_early", &attach_early, py::arg("run"), py::arg("release_next"),
           py::arg("predecessor_ended"))
      .def("error", &CudaDevice::error)
      .def("clear", &CudaDevice::clear)
      .def_readwrite("edit", &CudaDevice::edit)
      .def("counters", &counters_of)
      .def("records", &records_of)
      .def_property_readonly(
          "machine", [](CudaDevice& d) -> Machine& { return d.machine; },
          py::return_value_policy::reference)
      .def_property(
          "multiprocessors", [](CudaDevice& d) { return d.machine.room().multiprocessors(); },
          [](CudaDevice& d, int count) {
            d.machine.room().configure(d.machine.room().model(), count);
          })
      .def_property(
          "model", [](CudaDevice& d) { return d.machine.room().model().name; },
          [](CudaDevice& d, const std::string& name) {
            d.machine.room().configure(model_named(name), d.machine.room().multiprocessors());
          })
      .def_readwrite("seed", &CudaDevice::seed)
      .def_readwrite("device", &CudaDevice::device)
      .def_readwrite("races", &CudaDevice::races)
      .def_readwrite("copy_races", &CudaDevice::copy_races)
      .def_readwrite("peer_reductions", &CudaDevice::peer_reductions)
      .def_property(
          "vectors",
          [](CudaDevice& d) {
            return d.vectors == Vectors::kWhole      ? "whole"
                   : d.vectors == Vectors::kReported ? "reported"
                                                     : "apart";
          },
          [](CudaDevice& d, const std::string& name) { d.vectors = vectors_named(name); })
      .def_property_readonly_static(
          "ordering",
          [](const py::object&) {
            return reinterpret_cast<std::uintptr_t>(CudaDevice::ordering());
          })
      .def_property_readonly_static(
          "memory_functions",
          [](const py::object&) {
            return py::make_tuple(reinterpret_cast<std::uintptr_t>(&CudaDevice::add_memory),
                                  reinterpret_cast<std::uintptr_t>(&CudaDevice::remove_memory),
                                  reinterpret_cast<std::uintptr_t>(&CudaDevice::add_multicast));
          })
      .def_readwrite("unload_patience", &CudaDevice::unload_patience)
      .def_readwrite("max_statements", &CudaDevice::max_statements);
}

}  // namespace ptx_machine
