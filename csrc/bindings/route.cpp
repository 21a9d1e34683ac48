// Binds the maps of a grouped GEMM that the device makes.
#include "cuda_host/route.h"

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace flux::host {
namespace {

// Where one of the maps begins in the memory that they lie in, in words.
std::int64_t words_to(const void* map, const Route& route) {
  const auto begin = reinterpret_cast<std::uintptr_t>(route.maps().weights);
  return static_cast<std::int64_t>((reinterpret_cast<std::uintptr_t>(map) - begin) /
                                   sizeof(std::int32_t));
}

std::map<std::string, std::int64_t> offsets_of(const Route& route) {
  const RouteMaps maps = route.maps();
  std::map<std::string, std::int64_t> offsets;
  const auto add = [&](const char* name, const void* at) { offsets[name] = words_to(at, route); };
  add("weights", maps.weights);
  add("items", maps.item);
  add("experts", maps.expert);
  add("rows", maps.row);
  add("tokens", maps.token);
  add("sources", maps.source);
  add("counts", maps.count);
  add("positions", maps.position);
  add("pushes", maps.push);
  add("pushed", maps.pushed);
  add("shares", maps.share);
  add("totals", maps.totals);
  add("routed", maps.routed);
  return offsets;
}

}  // namespace

void bind_route(py::module_& m) {
  py::class_<Route, std::shared_ptr<Route>>(m, "Route")
      .def(py::init([](const Schedule& schedule, const Kernel& kernel, Address experts,
                       int expert_bytes, int topk, int total, int ep, int max_rows, int n,
                       int ahead, bool parallel) {
             const RouterChoices choices{experts, expert_bytes, topk, total, ep, max_rows};
             return std::make_shared<Route>(schedule, kernel, choices, n, ahead, parallel);
           }),
           py::kw_only(), py::arg("schedule"), py::arg("kernel"), py::arg("experts"),
           py::arg("expert_bytes"), py::arg("topk"), py::arg("total"), py::arg("ep"),
           py::arg("max_rows"), py::arg("n"), py::arg("ahead"), py::arg("parallel"),
           py::keep_alive<1, 2>())
      .def_property_readonly("words", &Route::words)
      .def_property_readonly("offsets", &offsets_of)
      .def_property_readonly(
          "totals", [](const Route& route) { return words_to(route.maps().totals, route); })
      .def_property_readonly(
          "routed", [](const Route& route) { return words_to(route.maps().routed, route); })
      .def("make", &Route::make, py::arg("kernel"), py::arg("room"), py::arg("stream"))
      .def("use", &Route::use, py::arg("room"), py::arg("weights"), py::arg("tail"),
           py::arg("element_bytes"))
      .def(
          "launch",
          [](const Route& route, const Kernel& kernel, std::uintptr_t status, Stream stream) {
            FluxSync sync{};
            sync.status = reinterpret_cast<std::uint64_t*>(status);
            route.launch(kernel, sync, stream);
          },
          py::arg("kernel"), py::arg("status"), py::arg("stream"));
}

}  // namespace flux::host
