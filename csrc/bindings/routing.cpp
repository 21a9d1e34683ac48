// Binds the routing of grouped ops.
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "schedule/grouped.h"
#include "schedule/schedule.h"
#include "schedule/selection.h"

namespace py = pybind11;

namespace flux::host {
namespace {

template <class T>
void copy_to(std::uintptr_t address, const std::vector<T>& values) {
  std::copy(values.begin(), values.end(), reinterpret_cast<std::int64_t*>(address));
}

std::shared_ptr<Routing> routing_of(std::uintptr_t experts, int m, int topk, int total,
                                    int first_expert, int local, int world) {
  for (const int size : {m, topk, total, world}) {
    if (size < 1)
      throw std::invalid_argument("sizes must be positive, got " + std::to_string(size));
  }
  if (first_expert < 0 || local < 0 || local > total - first_expert) {
    throw std::invalid_argument("experts [" + std::to_string(first_expert) + ", +" +
                                std::to_string(local) + ") are not of " + std::to_string(total));
  }
  const Choices choices{reinterpret_cast<const std::int64_t*>(experts), m, topk, total};
  const WithoutGil without;
  return std::make_shared<Routing>(choices, first_expert, local, world);
}

std::shared_ptr<Selection> selection_of(std::shared_ptr<Hops> hops, std::uintptr_t experts, int m,
                                        int topk, int total) {
  const Choices choices{reinterpret_cast<const std::int64_t*>(experts), m, topk, total};
  const WithoutGil without;
  return std::make_shared<Selection>(std::move(hops), choices);
}

// Writes the rows of a range that some groups need, counted from `base`; returns how many.
int rows_to(const Selection& selection, const Groups& groups, Range rows, int base,
            std::uintptr_t address) {
  auto* out = reinterpret_cast<std::int64_t*>(address);
  return selection.each_run(groups, rows, [&](Range run) {
    for (int row = run.begin; row < run.end; ++row) *out++ = row - base;
  });
}

// Experts that have routed rows of these tokens, with the rows.
std::vector<std::tuple<int, int, int>> groups_of(const Routing& r, int begin, int end) {
  if (begin < 0 || end < begin || end > r.map.m) {
    throw std::invalid_argument("tokens [" + std::to_string(begin) + ", " + std::to_string(end) +
                                ") are not of " + std::to_string(r.map.m));
  }
  std::vector<std::tuple<int, int, int>> groups;
  for (int expert = 0; expert < r.map.experts; ++expert) {
    const Range rows = routed_rows_of(r.map, expert, {begin, end});
    if (rows.begin < rows.end) groups.emplace_back(expert, rows.begin, rows.end);
  }
  return groups;
}

std::vector<const std::vector<int>*> maps_of(const GroupedWork& w) {
  return {&w.items,  &w.experts, &w.rows,   &w.tokens, &w.sources,
          &w.counts, &w.pushes,  &w.pushed, &w.shares};
}

// The maps of a grouped GEMM, one after the other.
void fill_work(const GroupedWork& work, std::uintptr_t address) {
  auto* to = reinterpret_cast<std::int32_t*>(address);
  for (const auto* map : maps_of(work)) to = std::copy(map->begin(), map->end(), to);
}

Choices choices_of(const Schedule& schedule, std::uintptr_t experts, int topk, int total) {
  const int m = schedule.spec.problem.m;
  return {reinterpret_cast<const std::int64_t*>(experts), m, topk, total};
}

void dispatch(GroupedWork& work, const Schedule& schedule, std::uintptr_t experts, int topk,
              int total, int ep) {
  const ScheduleSpec& s = schedule.spec;
  add_pushes(choices_of(schedule, experts, topk, total), s.tiles, s.comm, ep, &work);
}

void combine(GroupedWork& work, const Schedule& schedule, std::uintptr_t experts, int topk,
             int total, int ep) {
  const ScheduleSpec& s = schedule.spec;
  add_shares(choices_of(schedule, experts, topk, total), s.problem.world, s.tiles.rank, ep, &work);
}

}  // namespace

void bind_routing(py::module_& m) {
  py::class_<GroupedWork>(m, "GroupedWork")
      .def_property_readonly("sizes",
                             [](const GroupedWork& work) {
                               std::vector<std::size_t> sizes;
                               for (const auto* map : maps_of(work)) sizes.push_back(map->size());
                               return sizes;
                             })
      .def("fill", &fill_work, py::arg("address"))
      .def("dispatch", &dispatch, py::arg("schedule"), py::arg("experts"), py::arg("topk"),
           py::arg("total"), py::arg("ep"), py::call_guard<WithoutGil>())
      .def("combine", &combine, py::arg("schedule"), py::arg("experts"), py::arg("topk"),
           py::arg("total"), py::arg("ep"), py::call_guard<WithoutGil>());
  py::class_<Routing, std::shared_ptr<Routing>>(m, "Routing")
      .def(py::init(&routing_of), py::kw_only(), py::arg("experts"), py::arg("m"), py::arg("topk"),
           py::arg("total"), py::arg("first_expert"), py::arg("local"), py::arg("world"))
      .def_property_readonly("count", [](const Routing& r) { return routed_rows(r.map); })
      .def_property_readonly("offsets", [](const Routing& r) { return r.offsets; })
      .def_property_readonly("checksum", [](const Routing& r) { return r.checksum; })
      .def("groups", &groups_of, py::arg("begin"), py::arg("end"))
      .def(
          "gather_work",
          [](const Routing& r, const Schedule& schedule, int tile_m, int columns) {
            return gather_work(r.map, schedule.spec.tiles, schedule.spec.comm, tile_m, columns);
          },
          py::arg("schedule"), py::arg("tile_m"), py::arg("columns"), py::call_guard<WithoutGil>())
      .def(
          "sum_work",
          [](const Routing& r, const Schedule& schedule, int tile_m, int tile_n, int ahead) {
            TileOrder order = schedule.spec.tiles;
            order.tile_m = tile_m;
            order.tile_n = tile_n;
            return sum_work(r.map, order, ahead);
          },
          py::arg("schedule"), py::arg("tile_m"), py::arg("tile_n"), py::arg("ahead"),
          py::call_guard<WithoutGil>())
      .def(
          "fill",
          [](const Routing& r, std::uintptr_t tokens, std::uintptr_t choices, std::uintptr_t rows) {
            copy_to(tokens, r.tokens);
            copy_to(choices, r.choices);
            copy_to(rows, r.rows);
          },
          py::arg("tokens"), py::arg("choices"), py::arg("rows"));
  py::class_<Hops, std::shared_ptr<Hops>>(m, "Hops").def(
      py::init(
          [](const Schedule& schedule, int ep) { return std::make_shared<Hops>(schedule, ep); }),
      py::arg("schedule"), py::arg("ep"));
  py::class_<Selection, std::shared_ptr<Selection>>(m, "Selection")
      .def(py::init(&selection_of), py::arg("hops"), py::arg("experts"), py::arg("m"),
           py::arg("topk"), py::arg("total"))
      .def(
          "gathered",
          [](const Selection& s, int chunk, int dst, int begin, int end, std::uintptr_t rows) {
            return rows_to(s, s.hops().to(chunk, dst), {begin, end}, begin, rows);
          },
          py::arg("chunk"), py::arg("dst"), py::arg("begin"), py::arg("end"), py::arg("rows"))
      .def(
          "partial",
          [](const Selection& s, int source, bool combined, int begin, int end,
             std::uintptr_t rows) {
            return rows_to(s, s.hops().from(source, combined), {begin, end}, begin, rows);
          },
          py::arg("source"), py::arg("combined"), py::arg("begin"), py::arg("end"),
          py::arg("rows"));
}

}  // namespace flux::host
