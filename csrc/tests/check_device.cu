// Compiled, never run. Compilation shows that every function of csrc/core works on the device.
//
//   nvcc -std=c++17 -Icsrc -Werror all-warnings -arch=sm_90a -c csrc/tests/check_device.cu
//
// Without --expt-relaxed-constexpr a function that lacks FLUX_HD is an error here. The kernel's
// arguments are unknown to the compiler, so nothing is folded away, and every result reaches
// memory.
#include "core/all_reduce.h"
#include "core/comm_order.h"
#include "core/ownership.h"
#include "core/problem.h"
#include "core/relay.h"
#include "core/row_map.h"
#include "core/scatter.h"
#include "core/signal.h"
#include "core/tile_map.h"
#include "core/tile_order.h"

namespace flux {
namespace {

// Collects results of any shape into one number.
struct Digest {
  int value = 0;
  __device__ void add(int v) { value = value * 31 + v; }
  __device__ void add(std::int64_t v) { add(static_cast<int>(v)); }
  __device__ void add(Range r) { add(r.begin), add(r.end); }
  __device__ void add(Hop h) { add(h.chunk), add(h.peer); }
  __device__ void add(Coord c) { add(c.node), add(c.domain), add(c.lane); }
  __device__ void add(Mesh g) { add(g.nodes), add(g.domains), add(g.lanes); }
  __device__ void add(TileCoord c) { add(c.m), add(c.n); }
  __device__ void add(TileRun r) { add(r.first), add(r.count); }
  __device__ void add(Piece p) { add(p.column), add(p.begin), add(p.end); }
  __device__ void add(Strip s) { add(s.tile_row), add(s.begin), add(s.end); }
};

// problem.h, ownership.h
__global__ void check_ownership(Problem p, int rank, int row, int* out) {
  Digest d;
  d.add(ceil_div(p.m, p.world));
  d.add(min_of(p.m, p.n));
  d.add(max_of(p.m, p.n));
  d.add(wrap(rank - row, p.world));
  d.add(chunk_rows(p.m, p.world));
  d.add(row_begin(p.m, p.world, rank));
  d.add(row_end(p.m, p.world, rank));
  d.add(row_count(p.m, p.world, rank));
  d.add(owner_of(p.m, p.world, row));
  d.add(local_n(p, rank));
  d.add(local_k(p, rank));
  out[threadIdx.x] = d.value;
}

// signal.h
__global__ void check_signals(CommTiling c, int chunk, int tile, int begin, int end,
                              std::uint32_t observed, std::uint32_t expected, int* out) {
  Digest d;
  d.add(tiles_per_chunk(c));
  d.add(signal_count(c));
  d.add(signal_index(c, chunk, tile));
  d.add(comm_tile_rows(c, chunk, tile));
  d.add(comm_tile_of(c, begin));
  d.add(signals_of_rows(c, begin, end));
  d.add(epoch_reached(observed, expected) ? 1 : 0);
  out[threadIdx.x] = d.value;
}

// comm_order.h
__global__ void check_comm_order(Order order, Swizzle swizzle, Direction direction, Mesh mesh,
                                 int rank, int step, Coord offset, int* out) {
  Digest d;
  d.add(world_of(mesh));
  d.add(coord_of(mesh, rank));
  d.add(shifted(mesh, rank, offset, 1));
  d.add(mesh_seen_by(order, mesh));
  d.add(hierarchical_offset(mesh, step));
  d.add(numa_offset(mesh, step));
  d.add(offset_at(order, mesh, step));
  d.add(via_of(order, offset));
  d.add(arrival_sign(order, direction));
  d.add(recv_hop(order, mesh, direction, rank, step));
  d.add(send_hop(order, mesh, direction, rank, step));
  d.add(step_of_chunk(order, mesh, direction, rank, step));
  d.add(is_power_of_two(rank) ? 1 : 0);
  d.add(is_legal(swizzle, mesh) ? 1 : 0);
  d.add(ag_chunk_at(swizzle, order, mesh, direction, rank, step));
  d.add(visited_step(order, mesh, step));
  d.add(far_first_offset(mesh, step));
  d.add(rs_owner_at(swizzle, order, mesh, rank, step));
  out[threadIdx.x] = d.value;
}

// tile_order.h
__global__ void check_tile_order(TileOrder t, int slot, int* out) {
  Digest d;
  d.add(tiles_m(t));
  d.add(tiles_n(t));
  d.add(tile_count(t));
  d.add(chunk_at(t, slot));
  d.add(position_of_chunk(t, slot));
  d.add(position_of_tile(t, slot));
  d.add(tile_run_at(t, slot));
  d.add(slices_of(t));
  d.add(sliced_owners(t));
  d.add(runs_of(t));
  d.add(slice_of_tile(t, slot, slot));
  d.add(turn_at(t, slot));
  d.add(tile_row_at(t, slot));
  d.add(raster_slot(tiles_m(t), tiles_n(t), t.raster, slot));
  d.add(tile_at(t, slot));
  d.add(column_range(t, slot));
  d.add(is_visited_before(t, slot, slot) ? 1 : 0);
  d.add(column_run_at(t, slot));
  d.add(tile_column_at(t, slot));
  out[threadIdx.x] = d.value;
}

// row_map.h
__global__ void check_row_map(RowMap map, int expert, int owner, Range tokens, int* out) {
  Digest d;
  d.add(routed_rows(map));
  d.add(run_of(map, expert, owner));
  d.add(rows_of_expert(map, expert));
  d.add(first_row_from(map, expert, tokens.begin));
  d.add(routed_rows_of(map, expert, tokens));
  out[threadIdx.x] = d.value;
}

// tile_map.h, scatter.h, relay.h, all_reduce.h
__global__ void check_kernel_maps(TileOrder t, ScatterTiling s, int slot, int row, int* out) {
  Digest d;
  d.add(slice_rows_of(t, row));
  d.add(tile_at(tile_map(t), slot));
  d.add(owners_of_rows(s.m, s.world, row, row + s.tile_m));
  d.add(owners_of_tile(s, row));
  d.add(tiles_of_owner(s, slot));
  d.add(flag_rows(s));
  d.add(flag_columns(s));
  d.add(flag_count(s));
  d.add(flag_index(s, slot, slot, row, row));
  d.add(strips_per_tile(s.tile_m));
  d.add(strip_count(s));
  d.add(map_rows(s, 0));
  d.add(map_row(s, 0, 0));
  d.add(strips_of_owner(s, slot));
  d.add(strip_of_owner(s, slot, 0));
  d.add(rows_summed(s));
  d.add(sum_count(s, slot));
  d.add(sum_of_owner(s, slot, 0));
  d.add(copy_count(s));
  d.add(own_sum_count(s, slot));
  d.add(taken_words(s, slot));
  d.add(own_sum(s, slot, row, slot));
  d.add(copied_piece(s, row));
  d.add(begins_sum(s, row));
  d.add(sum_word(s, row, row));
  out[threadIdx.x] = d.value;
}

}  // namespace

// Launches keep the kernels from being discarded as unused.
void launch_checks(int* out) {
  const Mesh mesh{1, 1, 4};
  check_ownership<<<1, 1>>>(Problem{OpKind::kAGGemm, 7, 8, 8, 4}, 1, 3, out);
  check_row_map<<<1, 1>>>(RowMap{7, 4, 1}, 0, 1, Range{2, 5}, out);
  check_signals<<<1, 1>>>(CommTiling{7, 4, 1}, 1, 0, 2, 5, 4, 5, out);
  check_comm_order<<<1, 1>>>(Order::kDirect, Swizzle::kNone, Direction::kPull, mesh, 1, 0,
                             Coord{0, 0, 1}, out);
  const TileOrder order{OpKind::kAGGemm,  7,    8, 2, 2, 1, Swizzle::kNone, Order::kDirect,
                        Direction::kPull, mesh, 1};
  check_tile_order<<<1, 1>>>(order, 0, out);
  check_kernel_maps<<<1, 1>>>(order, ScatterTiling{7, 8, 4, 2, 2}, 0, 0, out);
}

// constexpr on the host as well.
static_assert(recv_hop(Order::kDirect, Mesh{1, 1, 8}, Direction::kPull, 5, 0).chunk == 6);
static_assert(tile_row_at(TileOrder{OpKind::kAGGemm, 8, 1, 1, 1, 1, Swizzle::kRankShift,
                                    Order::kDirect, Direction::kPull, Mesh{1, 1, 4}, 1},
                          0) == 2);

}  // namespace flux
