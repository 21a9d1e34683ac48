// Binds CudaOp and the simulated peers of loopback (flux/transport/loopback.py).
#include "cuda_host/cuda_op.h"

#include <pybind11/stl.h>

#include <array>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace flux::host {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Part = std::tuple<Address, std::int64_t, Addresses, Addresses>;

// The parts refer to the tuples.
std::vector<GatherPart> gather_parts(const std::vector<Part>& parts) {
  std::vector<GatherPart> all;
  for (const auto& [own, row_bytes, gathered, sources] : parts) {
    all.push_back({own, row_bytes, &gathered, &sources});
  }
  return all;
}

// Tuples, because they cost a call less than objects.
using RowsTuple = std::tuple<Address, std::int64_t, int, Address>;
using OperandTuple =
    std::tuple<Address, std::int64_t, int, Address, std::int64_t, Address, Address>;

Rows rows_of(const RowsTuple& t) {
  const auto& [x, ld, k, scale] = t;
  return {x, ld, k, scale};
}
Operand operand_of(const OperandTuple& t) {
  const auto& [weight, ld, n, out, out_ld, bias, scale] = t;
  return {weight, ld, n, out, out_ld, bias, scale};
}
std::vector<Operand> operands_of(const std::vector<OperandTuple>& tuples) {
  std::vector<Operand> all;
  for (const OperandTuple& t : tuples) all.push_back(operand_of(t));
  return all;
}

// If a kernel refuses a call that has begun, the call is broken, because peers wait for it. So this
// does not raise ValueError, which would say that nothing has happened.
template <class Call>
void all_or_broken(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(error.what());
  }
}

void bind_op(py::module_& m) {
  py::class_<CudaOp>(m, "CudaOp", "One rank's calls of a fused op on a GPU.")
      .def(py::init([](std::shared_ptr<Driver> driver, std::vector<std::shared_ptr<Kernel>> kernels,
                       int rank, Addresses pads, Addresses data, Address multicast,
                       bool sums_by_switch, std::int64_t row_bytes, int slots,
                       std::int64_t slot_bytes, std::int64_t guard_bytes, std::int64_t rest_offset,
                       std::int64_t sums_offset, bool scales_travel, bool all_reduce, float scale,
                       int signals, int offers, Address report, std::uint64_t timeout_ns,
                       int sm_count, int device, bool poison, int nodes,
                       std::shared_ptr<Remote> remote, int beside, int strips, int boxes, int dtype,
                       bool shared, bool graph_overlap, int lane, int margin, bool lends_margin,
                       std::int64_t pushed_bytes, int sum_flags, int sum_words,
                       std::int64_t second_offset, std::int64_t copied_offset, bool scaled_rows,
                       int x_bytes, std::int64_t staged_offset) {
             const int world = static_cast<int>(pads.size());
             return std::make_unique<CudaOp>(std::move(driver), std::move(kernels),
                                             CudaOpSetup{rank,
                                                         world,
                                                         std::move(pads),
                                                         std::move(data),
                                                         multicast,
                                                         sums_by_switch,
                                                         row_bytes,
                                                         slots,
                                                         slot_bytes,
                                                         guard_bytes,
                                                         rest_offset,
                                                         sums_offset,
                                                         scales_travel,
                                                         all_reduce,
                                                         scale,
                                                         signals,
                                                         offers,
                                                         report,
                                                         timeout_ns,
                                                         sm_count,
                                                         device,
                                                         poison,
                                                         nodes,
                                                         std::move(remote),
                                                         beside,
                                                         strips,
                                                         boxes,
                                                         dtype,
                                                         shared,
                                                         graph_overlap,
                                                         lane,
                                                         margin,
                                                         lends_margin,
                                                         pushed_bytes,
                                                         sum_flags,
                                                         sum_words,
                                                         second_offset,
                                                         copied_offset,
                                                         scaled_rows,
                                                         x_bytes,
                                                         staged_offset});
           }),
           py::kw_only(), py::arg("driver"), py::arg("kernels"), py::arg("rank"), py::arg("pads"),
           py::arg("data"), py::arg("multicast"), py::arg("sums_by_switch"), py::arg("row_bytes"),
           py::arg("slots"), py::arg("slot_bytes"), py::arg("guard_bytes"), py::arg("rest_offset"),
           py::arg("sums_offset"), py::arg("scales_travel"), py::arg("all_reduce"),
           py::arg("scale"), py::arg("signals"), py::arg("offers"), py::arg("report"),
           py::arg("timeout_ns"), py::arg("sm_count"), py::arg("device"), py::arg("poison"),
           py::arg("nodes") = 1, py::arg("remote") = nullptr, py::arg("beside") = 0,
           py::arg("strips") = 0, py::arg("boxes") = 0, py::arg("dtype") = 0,
           py::arg("shared") = false, py::arg("graph_overlap") = false, py::arg("lane") = 0,
           py::arg("margin") = 0, py::arg("lends_margin") = false, py::arg("pushed_bytes") = 0,
           py::arg("sum_flags") = 0, py::arg("sum_words") = 0, py::arg("second_offset") = 0,
           py::arg("copied_offset") = 0, py::arg("scaled_rows") = false, py::arg("x_bytes") = 2,
           py::arg("staged_offset") = 0)
      .def_static("pad_words", &CudaOp::pad_words, py::arg("world"), py::arg("signals"),
                  py::arg("offers"), py::arg("sum_words") = 0, py::arg("two_buffers") = false)
      .def("require_room", &CudaOp::require_room, py::arg("schedule"))
      .def("close", &CudaOp::close)
      .def("touch_peers", &CudaOp::touch_peers)
      .def("look", &CudaOp::look, py::call_guard<WithoutGil>())
      .def_property_readonly("key", [](const CudaOp& op) { return reinterpret_cast<Address>(&op); })
      .def("waiting",
           [](CudaOp& op) -> std::optional<std::pair<Address, std::uint64_t>> {
             const auto call = op.waiting();
             if (!call) return std::nullopt;
             return std::pair{reinterpret_cast<Address>(call->op), call->number};
           })
      .def("let_go", &CudaOp::let_go, py::call_guard<WithoutGil>())
      .def("trace", &CudaOp::trace, py::arg("kernels"), py::arg("streams"))
      .def_property("epoch", &CudaOp::epoch, &CudaOp::set_epoch)
      .def_property_readonly("failed", &CudaOp::failed)
      .def_property_readonly("copy_stream", &CudaOp::copy_stream)
      .def_property_readonly("network_stream", &CudaOp::network_stream)
      .def(
          "workspace_bytes",
          [](const CudaOp& op, const Schedule& schedule, const std::vector<OperandTuple>& operands,
             int k) { return op.workspace_bytes(schedule, operands_of(operands), k); },
          py::arg("schedule"), py::arg("operands"), py::arg("k"))
      .def(
          "set_route",
          [](CudaOp& op, std::shared_ptr<Route> route, Address bias, Address probs) {
            FluxGroups groups = route->groups();
            groups.bias = pointer<const void>(bias);
            groups.probs = pointer<const float>(probs);
            op.set_groups(groups, std::move(route));
          },
          py::arg("route"), py::arg("bias"), py::arg("probs"))
      .def(
          "set_columns",
          [](CudaOp& op, const std::vector<std::vector<std::pair<int, int>>>& columns) {
            std::vector<std::vector<Range>> ranges;
            for (const auto& of_rank : columns) {
              ranges.emplace_back();
              for (const auto& [begin, end] : of_rank) ranges.back().push_back({begin, end});
            }
            op.set_columns(std::move(ranges));
          },
          py::arg("columns"))
      .def(
          "project",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const RowsTuple& x,
             const OperandTuple& operand) {
            all_or_broken([&] { op.project(schedule, stream, rows_of(x), operand_of(operand)); });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("x"), py::arg("operand"))
      .def(
          "begin_heads",
          [](CudaOp& op, const Schedule& schedule,
             Stream stream) { all_or_broken([&] { op.begin_heads(schedule, stream); }); },
          py::arg("schedule"), py::arg("stream"))
      .def(
          "gather_heads",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const OperandTuple& operand) {
            all_or_broken([&] { op.gather_heads(schedule, stream, operand_of(operand)); });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("operand"))
      .def("set_workspace", &CudaOp::set_workspace, py::arg("stream"), py::arg("address"),
           py::arg("bytes"))
      .def(
          "ag_gemm",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const RowsTuple& x,
             const std::vector<OperandTuple>& operands, Address gathered,
             const Addresses& sources) {
            all_or_broken([&] {
              op.ag_gemm(schedule, stream, rows_of(x), operands_of(operands), gathered, sources);
            });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("x"), py::arg("operands"),
          py::arg("gathered"), py::arg("sources"))
      .def(
          "scatter",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const RowsTuple& x,
             const OperandTuple& operand) {
            all_or_broken([&] { op.scatter(schedule, stream, rows_of(x), operand_of(operand)); });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("x"), py::arg("operand"))
      .def(
          "reduce",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const OperandTuple& operand,
             Address out) {
            all_or_broken([&] { op.reduce(schedule, stream, operand_of(operand), out); });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("operand"), py::arg("out"))
      .def(
          "gemm_rs",
          [](CudaOp& op, const Schedule& schedule, Stream stream, const RowsTuple& x,
             const OperandTuple& operand, Address out) {
            all_or_broken(
                [&] { op.gemm_rs(schedule, stream, rows_of(x), operand_of(operand), out); });
          },
          py::arg("schedule"), py::arg("stream"), py::arg("x"), py::arg("operand"), py::arg("out"));
}

}  // namespace

void bind_cuda_op(py::module_& m) {
  bind_op(m);
  m.def(
      "act_as_peer",
      [](Driver& driver, const Schedule& schedule, int real, std::uintptr_t stream,
         std::uint32_t epoch, const std::vector<Part>& parts, const Addresses& entries,
         const Addresses& signals, const Addresses& offers, StreamTrace* trace) {
        const std::vector<GatherPart> all = gather_parts(parts);
        const GatherCall call{stream,  stream,  0,      epoch,  epoch, all,
                              entries, signals, offers, {0, 0}, trace};
        Gather(driver, schedule, call).act_as_peer(real);
      },
      py::kw_only(), py::arg("driver"), py::arg("schedule"), py::arg("real"), py::arg("stream"),
      py::arg("epoch"), py::arg("parts"), py::arg("entries"), py::arg("signals"), py::arg("offers"),
      py::arg("trace") = nullptr);
}

}  // namespace flux::host
