// Lanes of a trace: flux._C.Lane.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "host/bindings.h"
#include "host/lane.h"

namespace py = pybind11;

namespace flux::host {
namespace {

py::list records(const Lane& lane) {
  py::list all;
  for (std::size_t i = 0; i < lane.count(); ++i) {
    const Record& r = lane[i];
    all.append(py::make_tuple(r.begin_ns, r.end_ns, r.call, static_cast<int>(r.work), r.peer,
                              r.chunk, r.tile, r.range.begin, r.range.end, r.at, r.signal,
                              r.bytes));
  }
  return all;
}

Record record(int work, std::int64_t began_ns, int begin, int end, int peer, std::int64_t bytes) {
  Record r;
  r.begin_ns = began_ns;
  r.work = static_cast<Work>(work);
  r.peer = peer;
  r.range = {begin, end};
  r.bytes = bytes;
  return r;
}

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<Lane>(m, "Lane")
      .def(py::init<std::size_t>(), py::arg("capacity"))
      .def_static("now", &Lane::now)
      .def(
          "add",
          [](Lane& lane, int work, std::int64_t began_ns, int begin, int end, int peer,
             std::int64_t bytes, std::int64_t end_ns) {
            Record added = record(work, began_ns, begin, end, peer, bytes);
            added.end_ns = end_ns;
            lane.add(added);
          },
          py::arg("work"), py::arg("began_ns"), py::arg("begin") = 0, py::arg("end") = 0,
          py::arg("peer") = -1, py::arg("nbytes") = 0, py::arg("end_ns") = 0)
      .def(
          "add_after_last",
          [](Lane& lane, int work, std::int64_t began_ns, int number, int peer,
             std::int64_t bytes) {
            lane.add_after_last(record(work, began_ns, number, number + 1, peer, bytes));
          },
          py::arg("work"), py::arg("began_ns"), py::arg("number"), py::arg("peer"),
          py::arg("nbytes"))
      .def_property_readonly("records", &records)
      .def_property_readonly("dropped", &Lane::dropped)
      .def("clear", &Lane::clear);
}

}  // namespace flux::host
