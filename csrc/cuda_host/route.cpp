#include "cuda_host/route.h"

#include <stdexcept>
#include <string>

namespace flux::host {

FluxOrder order_of(const Schedule& schedule) {
  const TileOrder& tiles = schedule.spec.tiles;
  FluxOrder order{};
  order.world = schedule.spec.problem.world;
  order.rank = tiles.rank;
  order.order = static_cast<int>(tiles.order);
  order.direction = static_cast<int>(tiles.direction);
  order.swizzle = static_cast<int>(tiles.swizzle);
  order.nodes = tiles.mesh.nodes;
  order.domains = tiles.mesh.domains;
  order.lanes = tiles.mesh.lanes;
  order.raster = tiles.raster;
  order.comm_tile_rows = schedule.spec.comm.rows;
  order.sequence = schedule.sequence.empty() ? nullptr : schedule.sequence.data();
  return order;
}

Route::Route(const Schedule& schedule, const Kernel& kernel, const RouterChoices& choices, int n,
             int ahead, bool parallel) {
  args_.experts = reinterpret_cast<const void*>(choices.experts);
  args_.expert_bytes = choices.expert_bytes;
  args_.m = schedule.spec.problem.m;
  args_.topk = choices.topk;
  args_.total = choices.total;
  args_.ep = choices.ep;
  args_.max_rows = choices.max_rows;
  args_.n = n;
  args_.tile_m = kernel.tile_m();
  args_.tile_n = kernel.tile_n();
  args_.ahead = ahead;
  args_.gathers = schedule.spec.tiles.op == OpKind::kAGGemm ? 1 : 0;
  args_.parallel = parallel ? 1 : 0;
  args_.order = order_of(schedule);
  const std::int64_t most = kMaxTiles, pairs = std::int64_t{args_.m} * args_.topk;
  if (args_.ep < 1 || args_.order.world % args_.ep != 0 || pairs > kMaxExtent) {
    throw std::invalid_argument("ep must divide the world, and tokens times topk be at most " +
                                std::to_string(kMaxExtent) + ", got ep " +
                                std::to_string(args_.ep) + " and " + std::to_string(pairs));
  }
  const RouteMaps sizes = maps();
  if (sizes.items > most || std::int64_t{sizes.experts} * sizes.spans > most) {
    throw std::invalid_argument(
        "max_rows = " + std::to_string(args_.max_rows) + " and " + std::to_string(sizes.experts) +
        " experts make " + std::to_string(sizes.items) + " tiles of " +
        std::to_string(sizes.spans) + " spans, at most " + std::to_string(most) + " are possible");
  }
}

std::int64_t Route::words() const {
  const RouteMaps maps = this->maps();
  const auto begin = reinterpret_cast<std::uintptr_t>(args_.room);
  return static_cast<std::int64_t>((reinterpret_cast<std::uintptr_t>(maps.words_behind) - begin) /
                                   sizeof(std::int32_t));
}

void Route::make(const Kernel& kernel, Address room, Stream stream) {
  args_.room = reinterpret_cast<std::int32_t*>(room);
  kernel.route(args_, stream);
  args_.experts = nullptr;
}

void Route::use(Address room, const std::vector<Address>& weights, Address tail,
                int element_bytes) {
  if (static_cast<int>(weights.size()) != maps().experts) {
    throw std::invalid_argument("a rank with " + std::to_string(maps().experts) +
                                " experts needs as many weights, got " +
                                std::to_string(weights.size()));
  }
  args_.room = reinterpret_cast<std::int32_t*>(room);
  args_.tail = reinterpret_cast<void*>(tail);
  args_.element_bytes = element_bytes;
  weights_.clear();
  for (const Address weight : weights) weights_.push_back(reinterpret_cast<const void*>(weight));
}

void Route::launch(const Kernel& kernel, const FluxSync& sync, Stream stream) const {
  FluxRouteArgs args = args_;
  args.weights = weights_.data();
  args.sync = sync;
  kernel.route(args, stream);
}

}  // namespace flux::host
