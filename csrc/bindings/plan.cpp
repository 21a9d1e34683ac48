// Binds the simulation of steps.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "plan/simulation.h"

namespace py = pybind11;

namespace flux::host {
namespace {

using plan::InOrder;
using plan::MostUrgent;
using plan::StepGraph;
using plan::Times;
using Lists = std::vector<std::vector<int>>;

StepGraph step_graph(Lists after, std::vector<int> deps, std::vector<int> stage,
                     std::vector<bool> communicates, int stages) {
  StepGraph graph{std::move(after), std::move(deps), std::move(stage), std::move(communicates),
                  stages};
  graph.check();
  return graph;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Times>(m, "StepTimes")
      .def_readonly("start", &Times::start)
      .def_readonly("end", &Times::end)
      .def_readonly("ended", &Times::ended);
  py::class_<StepGraph>(m, "StepGraph")
      .def(py::init(&step_graph), py::arg("after"), py::arg("deps"), py::arg("stage"),
           py::arg("communicates"), py::arg("stages"))
      .def(
          "run_in_order",
          [](const StepGraph& graph, std::vector<double> solo, Lists lanes, std::vector<int> kinds,
             plan::Overlap overlap) {
            return InOrder(graph, std::move(solo), std::move(lanes), std::move(kinds),
                           std::move(overlap))
                .run();
          },
          py::arg("solo"), py::arg("lanes"), py::arg("kinds"), py::arg("overlap"))
      .def(
          "run_most_urgent",
          [](const StepGraph& graph, std::vector<double> solo, std::vector<int> lane_of,
             std::vector<double> priority, std::vector<int> block, Lists left) {
            MostUrgent lists(graph, std::move(solo), std::move(lane_of), std::move(priority),
                             std::move(block), std::move(left));
            Times times = lists.run();
            return std::pair(std::move(times), lists.order());
          },
          py::arg("solo"), py::arg("lane_of"), py::arg("priority"), py::arg("block"),
          py::arg("left"));
}

}  // namespace flux::host
