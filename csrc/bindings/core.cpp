// Binds csrc/core for tests and tools, and the schedule builder. Ranges, hops and coordinates are
// tuples.
#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "core/all_reduce.h"
#include "core/relay.h"
#include "core/tile_map.h"
#include "schedule/schedule.h"

namespace py = pybind11;

namespace flux::host {
namespace {

using MeshTuple = std::tuple<int, int, int>;
using RangeTuple = std::pair<int, int>;

Mesh mesh_of(const MeshTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }
RangeTuple tuple_of(Range r) { return {r.begin, r.end}; }
std::tuple<int, int, int> tuple_of(Piece p) { return {p.column, p.begin, p.end}; }
std::pair<int, int> tuple_of(Hop h) { return {h.chunk, h.peer}; }

// Of tiles, which may be larger than what they cut.
constexpr int kAnySize = std::numeric_limits<int>::max();

struct Bounded {
  const char* name;
  int value;
  int least;
  int most = kMaxExtent;
};

// The maps divide by their arguments and do not check them: kernels evaluate them.
void in_range(std::initializer_list<Bounded> values) {
  for (const Bounded& v : values) {
    if (v.value >= v.least && v.value <= v.most) continue;
    throw std::invalid_argument(std::string(v.name) + " must be in [" + std::to_string(v.least) +
                                ", " + std::to_string(v.most) + "], got " +
                                std::to_string(v.value));
  }
}

auto with_checks(int (*map)(int, int)) {
  return [map](int m, int world) {
    in_range({{"m", m, 0}, {"world", world, 1}});
    return map(m, world);
  };
}

auto with_checks(int (*map)(int, int, int)) {
  return [map](int m, int world, int rank) {
    in_range({{"m", m, 0}, {"world", world, 1}, {"rank", rank, 0, world}});
    return map(m, world, rank);
  };
}

CommTiling checked_tiling(int m, int world, int rows) {
  in_range({{"m", m, 1}, {"world", world, 1}, {"rows", rows, 1, kAnySize}});
  return {m, world, rows};
}

void check_mesh(const MeshTuple& mesh, int rank) {
  const auto [nodes, domains, lanes] = mesh;
  in_range({{"nodes", nodes, 1, kMaxRanks},
            {"domains", domains, 1, kMaxRanks},
            {"lanes", lanes, 1, kMaxRanks}});
  in_range({{"ranks of a mesh", nodes * domains * lanes, 1, kMaxRanks}});
  in_range({{"rank", rank, 0, nodes * domains * lanes - 1}});
}

void check_slot(int slot, std::int64_t tiles) {
  in_range({{"slot", slot, 0, static_cast<int>(std::min<std::int64_t>(tiles, kMaxExtent)) - 1}});
}

void check_step(const MeshTuple& mesh, int rank, int step) {
  check_mesh(mesh, rank);
  in_range({{"step", step, 0, world_of(mesh_of(mesh)) - 2}});
}

TileOrder tile_order(int op, int m, int n, int tile_m, int tile_n, int raster, int swizzle,
                     int order, int direction, const MeshTuple& mesh, int rank) {
  return TileOrder{static_cast<OpKind>(op),
                   m,
                   n,
                   tile_m,
                   tile_n,
                   raster,
                   static_cast<Swizzle>(swizzle),
                   static_cast<Order>(order),
                   static_cast<Direction>(direction),
                   mesh_of(mesh),
                   rank};
}

std::shared_ptr<Schedule> make_schedule(int op, int m, int n, int k, int rank,
                                        const MeshTuple& mesh, int tile_m, int tile_n, int raster,
                                        int comm_rows, int direction, int order, int swizzle,
                                        int store, std::vector<int> hosts, bool spread, bool split,
                                        bool copied, bool in_kernel, bool sums_in_kernel,
                                        std::vector<int> rows) {
  ScheduleSpec spec;
  spec.problem = Problem{static_cast<OpKind>(op), m, n, k, world_of(mesh_of(mesh))};
  // Do not divide by a world below 1, which build_schedule refuses later.
  const int columns = spec.problem.world >= 1 ? local_n(spec.problem, rank) : 0;
  spec.tiles =
      tile_order(op, m, columns, tile_m, tile_n, raster, swizzle, order, direction, mesh, rank);
  spec.comm = CommTiling{m, spec.problem.world, comm_rows};
  spec.store = static_cast<Store>(store);
  spec.hosts = std::move(hosts);
  spec.spread = spread;
  spec.split = split;
  spec.copied = copied;
  spec.in_kernel = in_kernel;
  spec.sums_in_kernel = sums_in_kernel;
  spec.rows = std::move(rows);
  return std::make_shared<Schedule>(build_schedule(spec));
}

py::tuple tuple_of(const Transfer& t) {
  return py::make_tuple(t.step, t.src, t.dst, t.chunk, t.tile, t.rows.begin, t.rows.end, t.signal,
                        t.forwarded);
}

py::tuple tuple_of(const Home& h) { return py::make_tuple(h.holder, h.block); }

py::tuple tuple_of(const Share& s) { return py::make_tuple(s.source, s.signal, s.block); }

template <class T>
py::tuple tuples_of(const std::vector<T>& list);

py::tuple tuple_of(const Reduction& r) {
  return py::make_tuple(r.owner, r.tile, r.rows.begin, r.rows.end, tuples_of(r.shares), r.target,
                        r.signal, r.block);
}

py::tuple tuple_of(const Parcel& p) {
  return py::make_tuple(static_cast<int>(p.kind), p.chunk, p.rows.begin, p.rows.end, p.signal,
                        p.block);
}

py::tuple tuple_of(const Visit& v) {
  return py::make_tuple(v.rows.begin, v.rows.end, v.cols.begin, v.cols.end, tuple_of(v.waits),
                        v.owner, tuple_of(v.completes));
}

template <class T>
py::tuple tuples_of(const std::vector<T>& list) {
  py::tuple out(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) out[i] = tuple_of(list[i]);
  return out;
}

// Maps that only kernels evaluate.
void bind_kernel_maps(py::module_& core) {
  py::class_<TileMap>(core, "TileMap")
      .def(py::init([](const TileOrder& t) { return tile_map(t); }), py::arg("order"))
      .def_property_readonly("runs",
                             [](const TileMap& map) {
                               std::vector<RangeTuple> runs;
                               for (int i = 0; i < map.runs; ++i) {
                                 runs.emplace_back(map.first[i], map.past[i]);
                               }
                               return runs;
                             })
      .def("tile_at", [](const TileMap& map, int slot) {
        check_slot(slot, std::int64_t{map.rows} * map.columns);
        const TileCoord c = tile_at(map, slot);
        return std::make_pair(c.m, c.n);
      });
  py::class_<ScatterTiling>(core, "ScatterTiling")
      .def(py::init([](int m, int n, int world, int tile_m, int tile_n) {
             in_range({{"m", m, 1},
                       {"n", n, 0},
                       {"world", world, 1},
                       {"rows of a tile", tile_m, 1, kAnySize},
                       {"columns of a tile", tile_n, 1, kAnySize}});
             return ScatterTiling{m, n, world, tile_m, tile_n};
           }),
           py::arg("m"), py::arg("n"), py::arg("world"), py::arg("tile_m"), py::arg("tile_n"))
      .def("owners_of_tile",
           [](const ScatterTiling& s, int tile) { return tuple_of(owners_of_tile(s, tile)); })
      .def("tiles_of_owner",
           [](const ScatterTiling& s, int owner) { return tuple_of(tiles_of_owner(s, owner)); })
      .def("flag_rows", &flag_rows)
      .def("flag_columns", &flag_columns)
      .def("flag_count", &flag_count)
      .def("flag_index", &flag_index, py::arg("source"), py::arg("owner"), py::arg("tile_row"),
           py::arg("tile_column"))
      .def("map_rows", &map_rows, py::arg("owner"))
      .def("map_row", &map_row, py::arg("owner"), py::arg("row"))
      .def("strip_count", &strip_count)
      .def("strips_of_owner", &strips_of_owner, py::arg("owner"))
      .def("strip_of_owner",
           [](const ScatterTiling& s, int owner, int index) {
             const Strip strip = strip_of_owner(s, owner, index);
             return std::make_tuple(strip.tile_row, strip.begin, strip.end);
           })
      .def("sum_count", &sum_count, py::arg("owner"))
      .def("sum_of_owner", [](const ScatterTiling& s, int owner,
                              int index) { return tuple_of(sum_of_owner(s, owner, index)); })
      .def("own_sum_count", &own_sum_count, py::arg("owner"))
      .def("own_sum", [](const ScatterTiling& s, int owner, int raster,
                         int index) { return tuple_of(own_sum(s, owner, raster, index)); })
      .def("copy_count", &copy_count)
      .def("copied_piece",
           [](const ScatterTiling& s, int index) { return tuple_of(copied_piece(s, index)); })
      .def("begins_sum", &begins_sum, py::arg("row"))
      .def("sum_word", &sum_word, py::arg("row"), py::arg("column"));
  core.attr("sum_rows") = kSumRows;
  core.attr("strip_rows") = kStripRows;
  core.attr("guard_rows") = kGuardRows;
  core.attr("max_runs") = kMaxRuns;
  core.attr("max_tiles") = kMaxTiles;
}

}  // namespace

void bind_core(py::module_& m) {
  auto core = m.def_submodule("core", "The integer maps of csrc/core.");
  core.def("chunk_rows", with_checks(&chunk_rows), py::arg("m"), py::arg("world"));
  core.def("row_begin", with_checks(&row_begin), py::arg("m"), py::arg("world"), py::arg("rank"));
  core.def("row_end", with_checks(&row_end), py::arg("m"), py::arg("world"), py::arg("rank"));
  core.def("row_count", with_checks(&row_count), py::arg("m"), py::arg("world"), py::arg("rank"));
  core.def("local_n", [](int op, int n, int world, int rank) {
    in_range({{"n", n, 0}, {"world", world, 1}, {"rank", rank, 0, world}});
    return local_n(Problem{static_cast<OpKind>(op), 1, n, 1, world}, rank);
  });
  core.def("local_k", [](int op, int k, int world, int rank) {
    in_range({{"k", k, 0}, {"world", world, 1}, {"rank", rank, 0, world}});
    return local_k(Problem{static_cast<OpKind>(op), 1, 1, k, world}, rank);
  });
  core.def(
      "owner_of",
      [](int m, int world, int row) {
        in_range({{"m", m, 1}, {"world", world, 1}, {"row", row, 0}});
        return owner_of(m, world, row);
      },
      py::arg("m"), py::arg("world"), py::arg("row"));
  core.def("tiles_per_chunk", [](int m, int world, int rows) {
    return tiles_per_chunk(checked_tiling(m, world, rows));
  });
  core.def("signal_index", [](int m, int world, int rows, int chunk, int tile) {
    in_range({{"chunk", chunk, 0}, {"tile", tile, 0}});
    return signal_index(checked_tiling(m, world, rows), chunk, tile);
  });
  core.def("comm_tile_rows", [](int m, int world, int rows, int chunk, int tile) {
    in_range({{"chunk", chunk, 0}, {"tile", tile, 0}});
    return tuple_of(comm_tile_rows(checked_tiling(m, world, rows), chunk, tile));
  });
  core.def("comm_tile_of", [](int m, int world, int rows, int row) {
    in_range({{"row", row, 0}});
    return comm_tile_of(checked_tiling(m, world, rows), row);
  });
  core.def("signals_of_rows", [](int m, int world, int rows, int begin, int end) {
    in_range({{"begin", begin, 0}, {"end", end, 1}});
    return tuple_of(signals_of_rows(checked_tiling(m, world, rows), begin, end));
  });
  core.def("epoch_reached", &epoch_reached, py::arg("observed"), py::arg("expected"));
  core.def("recv_hop", [](int order, const MeshTuple& mesh, int direction, int rank, int step) {
    check_step(mesh, rank, step);
    return tuple_of(recv_hop(static_cast<Order>(order), mesh_of(mesh),
                             static_cast<Direction>(direction), rank, step));
  });
  core.def("send_hop", [](int order, const MeshTuple& mesh, int direction, int rank, int step) {
    check_step(mesh, rank, step);
    return tuple_of(send_hop(static_cast<Order>(order), mesh_of(mesh),
                             static_cast<Direction>(direction), rank, step));
  });
  core.def("step_of_chunk",
           [](int order, const MeshTuple& mesh, int direction, int rank, int chunk) {
             check_mesh(mesh, rank);
             return step_of_chunk(static_cast<Order>(order), mesh_of(mesh),
                                  static_cast<Direction>(direction), rank, chunk);
           });
  core.def("swizzle_is_legal", [](int swizzle, const MeshTuple& mesh) {
    check_mesh(mesh, 0);
    return is_legal(static_cast<Swizzle>(swizzle), mesh_of(mesh));
  });
  py::class_<TileOrder>(core, "TileOrder")
      .def(py::init([](int op, int m, int n, int tile_m, int tile_n, int raster, int swizzle,
                       int order, int direction, const MeshTuple& mesh, int rank) {
             check_mesh(mesh, rank);
             in_range({{"m", m, 1},
                       {"n", n, 0},
                       {"rows of a tile", tile_m, 1, kAnySize},
                       {"columns of a tile", tile_n, 1, kAnySize},
                       {"raster", raster, 1, kAnySize}});
             return tile_order(op, m, n, tile_m, tile_n, raster, swizzle, order, direction, mesh,
                               rank);
           }),
           py::kw_only(), py::arg("op"), py::arg("m"), py::arg("n"), py::arg("tile_m"),
           py::arg("tile_n"), py::arg("raster"), py::arg("swizzle"), py::arg("order"),
           py::arg("direction"), py::arg("mesh"), py::arg("rank"))
      .def("tiles_m", [](const TileOrder& t) { return tiles_m(t); })
      .def("tiles_n", [](const TileOrder& t) { return tiles_n(t); })
      .def("tile_count", [](const TileOrder& t) { return tile_count(t); })
      .def("chunk_at",
           [](const TileOrder& t, int position) {
             in_range({{"position", position, 0, world_of(t.mesh) - 1}});
             return chunk_at(t, position);
           })
      .def("position_of_tile",
           [](const TileOrder& t, int tile) {
             in_range({{"tile", tile, 0, tiles_m(t) - 1}});
             return position_of_tile(t, tile);
           })
      .def("tile_row_at",
           [](const TileOrder& t, int slot) {
             in_range({{"slot", slot, 0, tiles_m(t) - 1}});
             return tile_row_at(t, slot);
           })
      .def("tile_at", [](const TileOrder& t, int slot) {
        check_slot(slot, tile_count(t));
        const TileCoord c = tile_at(t, slot);
        return std::make_pair(c.m, c.n);
      });
  bind_kernel_maps(core);
}

void bind_schedule(py::module_& m) {
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def_property_readonly("visits", [](const Schedule& s) { return tuples_of(s.visits); })
      .def_property_readonly("transfers", [](const Schedule& s) { return tuples_of(s.transfers); })
      .def_property_readonly("results", [](const Schedule& s) { return tuples_of(s.results); })
      .def_property_readonly("receipts", [](const Schedule& s) { return tuples_of(s.receipts); })
      .def_property_readonly("program",
                             [](const Schedule& s) {
                               py::tuple out(s.program.size());
                               for (std::size_t i = 0; i < s.program.size(); ++i) {
                                 out[i] = py::make_tuple(static_cast<int>(s.program[i].kind),
                                                         s.program[i].index);
                               }
                               return out;
                             })
      .def_property_readonly("reductions",
                             [](const Schedule& s) { return tuples_of(s.reductions); })
      .def_property_readonly("homes", [](const Schedule& s) { return tuples_of(s.homes); })
      .def(
          "parcels_for",
          [](const Schedule& s, int peer) { return tuples_of(parcels_for(s, peer)); },
          py::arg("peer"))
      .def_property_readonly("signals", [](const Schedule& s) { return s.needs.signals; })
      .def_property_readonly("needs",
                             [](const Schedule& s) {
                               const Needs& n = s.needs;
                               return py::make_tuple(n.signals, n.blocks, n.block_rows,
                                                     n.result_rows);
                             })
      .def_readonly("publishes_own", &Schedule::publishes_own);
  m.def("build_schedule", &make_schedule, py::kw_only(), py::arg("op"), py::arg("m"), py::arg("n"),
        py::arg("k"), py::arg("rank"), py::arg("mesh"), py::arg("tile_m"), py::arg("tile_n"),
        py::arg("raster"), py::arg("comm_rows"), py::arg("direction"), py::arg("order"),
        py::arg("swizzle"), py::arg("store"), py::arg("hosts") = std::vector<int>(),
        py::arg("spread") = false, py::arg("split") = false, py::arg("copied") = false,
        py::arg("in_kernel") = false, py::arg("sums_in_kernel") = false,
        py::arg("rows") = std::vector<int>());
  m.def(
      "room_for",
      [](int order, int direction, const MeshTuple& mesh, const std::vector<int>& hosts) {
        check_mesh(mesh, 0);
        const Room room = room_for(static_cast<Order>(order), static_cast<Direction>(direction),
                                   mesh_of(mesh), hosts);
        return std::make_pair(room.blocks, room.regions);
      },
      py::kw_only(), py::arg("order"), py::arg("direction"), py::arg("mesh"),
      py::arg("hosts") = std::vector<int>());
}

}  // namespace flux::host
