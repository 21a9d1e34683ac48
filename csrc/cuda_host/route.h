// Maps of a grouped GEMM that the device makes (cuda_moe/route.h), of one call.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_host/driver.h"
#include "cuda_host/kernels.h"
#include "cuda_moe/route.h"
#include "schedule/schedule.h"

namespace flux::host {

// The order of a schedule, which must outlive it.
FluxOrder order_of(const Schedule& schedule);

// What a router chose, as it lies on the device.
struct RouterChoices {
  Address experts;  // [m, topk]
  int expert_bytes;
  int topk;
  int total;
  int ep;
  int max_rows;
};

class Route {
 public:
  // Throws std::invalid_argument if the maps would be too large. `n`: columns of the GEMM. `ahead`: see
  // FluxRouteArgs. The schedule must outlive it.
  Route(const Schedule& schedule, const Kernel& kernel, const RouterChoices& choices, int n,
        int ahead, bool parallel);

  // Memory that launch() fills, in words of 32 bits; with the maps as they lie there.
  std::int64_t words() const;
  RouteMaps maps() const { return route_maps(args_); }
  FluxGroups groups() const { return route_groups(args_); }

  // Makes the maps now, before the call, whose launch() then adds the weights. What has no result is not
  // reported: the totals say so. `room`: of words().
  void make(const Kernel& kernel, Address room, Stream stream);
  // `room`: of words(). `weights`: by expert of this rank. `tail`: FluxRouteArgs.tail.
  void use(Address room, const std::vector<Address>& weights, Address tail, int element_bytes);
  void launch(const Kernel& kernel, const FluxSync& sync, Stream stream) const;

 private:
  FluxRouteArgs args_{};
  std::vector<const void*> weights_;
};

}  // namespace flux::host
