#include "schedule/selection.h"

#include <stdexcept>
#include <string>

#include "cpu/reducing.h"

namespace flux::host {
namespace {

void add(Groups* set, const Groups& more) {
  for (std::size_t i = 0; i < set->size(); ++i) (*set)[i] |= more[i];
}

}  // namespace

Hops::Hops(const Schedule& schedule, int ep) : ep_(ep) {
  const ScheduleSpec& spec = schedule.spec;
  const int world = spec.problem.world, own = spec.tiles.rank;
  if (ep < 1 || world % ep != 0) {
    throw std::invalid_argument("ep must divide the world of " + std::to_string(world) + ", got " +
                                std::to_string(ep));
  }
  const std::size_t words = (static_cast<std::size_t>(ep) + 63) / 64;
  for (int rank = 0; rank < world; ++rank) {
    const int group = rank / (world / ep);
    of_rank_.emplace_back(words);
    of_rank_.back()[group / 64] = std::uint64_t{1} << (group % 64);
  }
  const Placement placement = placement_of(spec);
  host_of_ = placement.host_of();
  if (spec.problem.op != OpKind::kAGGemm) {
    two_levels_ = Reducing(spec).two_levels();
    for (int rank = 0; rank < world; ++rank) {
      of_host_.emplace_back(words);
      for (const int member : placement.members(host_of_[rank])) {
        add(&of_host_.back(), of_rank_[member]);
      }
    }
    return;
  }
  // By chunk, the rank that each rank gets it from.
  std::vector<std::vector<int>> source(world, std::vector<int>(world, -1));
  for (int rank = 0; rank < world; ++rank) {
    for (const Hop& hop : arrivals(spec, rank)) source[hop.chunk][rank] = hop.peer;
  }
  for (int chunk = 0; chunk < world; ++chunk) {
    std::vector<Groups> behind(world, Groups(words));
    for (int rank = 0; rank < world; ++rank) {
      for (int at = rank; at >= 0; at = source[chunk][at]) add(&behind[at], of_rank_[rank]);
    }
    for (int rank = 0; rank < world; ++rank) {
      if (rank == own || source[chunk][rank] == own) to_[{chunk, rank}] = behind[rank];
    }
  }
}

Selection::Selection(std::shared_ptr<const Hops> hops, const Choices& choices)
    : hops_(std::move(hops)), words_((static_cast<std::size_t>(hops_->ep()) + 63) / 64) {
  std::vector<int> group_of(static_cast<std::size_t>(choices.total));
  for (int expert = 0; expert < choices.total; ++expert) {
    group_of[expert] = owner_of(choices.total, hops_->ep(), expert);
  }
  masks_.assign(static_cast<std::size_t>(choices.m) * words_, 0);
  for (std::size_t row = 0; row < static_cast<std::size_t>(choices.m); ++row) {
    for (int choice = 0; choice < choices.topk; ++choice) {
      const std::int64_t expert = choices.experts[row * choices.topk + choice];
      if (expert < 0) continue;
      const int group = group_of[expert];
      masks_[row * words_ + group / 64] |= std::uint64_t{1} << (group % 64);
    }
  }
}

}  // namespace flux::host
