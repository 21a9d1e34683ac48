// Binds lanes of a trace (flux._C.Lane) and the times of GPU streams (flux._C.StreamTrace).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>

#include "bindings/bindings.h"
#include "cpu/lane.h"
#include "cuda_host/stream_trace.h"

namespace py = pybind11;

namespace flux::host {
namespace {

py::tuple fields(const Record& r) {
  return py::make_tuple(r.begin_ns, r.end_ns, r.call, static_cast<int>(r.work), r.peer, r.chunk,
                        r.tile, r.range.begin, r.range.end, r.at, r.signal, r.bytes);
}

py::list records(const Lane& lane) {
  py::list all;
  for (std::size_t i = 0; i < lane.count(); ++i) all.append(fields(lane[i]));
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

void bind_streams(py::module_& m) {
  py::class_<StreamTrace, std::shared_ptr<StreamTrace>>(m, "StreamTrace")
      .def(py::init<std::shared_ptr<Driver>, std::size_t>(), py::arg("driver"), py::arg("capacity"))
      .def("begin", &StreamTrace::begin, py::arg("stream"))
      .def(
          "end",
          [](StreamTrace& trace, int token, Stream stream, int work, std::uint32_t call, int peer,
             int begin, int end, int at, int signal, std::int64_t bytes) {
            trace.end(token, stream,
                      record_of(static_cast<Work>(work), call, peer, -1, -1, {begin, end}, at,
                                signal, bytes));
          },
          py::arg("token"), py::arg("stream"), py::arg("work"), py::arg("call") = 0,
          py::arg("peer") = -1, py::arg("begin") = 0, py::arg("end") = 0, py::arg("at") = -1,
          py::arg("signal") = -1, py::arg("nbytes") = 0)
      .def(
          "tie",
          [](StreamTrace& trace, Stream stream, const Kernel* kernel, std::uintptr_t times) {
            const ClockTie t = trace.tie(stream, kernel, reinterpret_cast<std::uint64_t*>(times));
            return py::make_tuple(t.offset_ns, t.uncertainty_ns, t.between_ns, t.resolution_ns);
          },
          py::arg("stream"), py::arg("kernel") = nullptr, py::arg("times") = 0)
      .def_property_readonly("records",
                             [](const StreamTrace& trace) {
                               py::list all;
                               for (const auto& [stream, record] : trace.read()) {
                                 all.append(py::make_tuple(stream, fields(record)));
                               }
                               return all;
                             })
      .def_property_readonly("dropped", &StreamTrace::dropped)
      .def("close", &StreamTrace::close)
      .def_property_readonly_static("STAMPS",
                                    [](const py::object&) { return StreamTrace::kStamps; });
}

}  // namespace flux::host
