#include "schedule/routes.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace flux::host {

Placement::Placement(std::vector<int> host_of) : host_of_(std::move(host_of)) {
  for (const int host : host_of_) {
    if (host < 0 || host >= world()) {
      throw std::invalid_argument("hosts must be numbered from 0, got " + std::to_string(host));
    }
    if (host >= hosts()) members_.resize(host + 1);
  }
  for (int rank = 0; rank < world(); ++rank) {
    auto& here = members_[host_of_[rank]];
    lane_.push_back(static_cast<int>(here.size()));
    here.push_back(rank);
  }
  for (int host = 0; host < hosts(); ++host) {
    if (members_[host].empty()) {
      throw std::invalid_argument("hosts must be numbered without gaps: no rank is on host " +
                                  std::to_string(host));
    }
  }
}

Placement Placement::of(const Mesh& mesh) {
  std::vector<int> host_of;
  for (int rank = 0; rank < world_of(mesh); ++rank) host_of.push_back(coord_of(mesh, rank).node);
  return Placement(std::move(host_of));
}

int Placement::proxy(int host, int owner) const {
  if (host == host_of_[owner]) return owner;
  const auto& there = members_[host];
  return there[lane_[owner] % there.size()];
}

std::vector<int> Placement::combined_by(int rank) const {
  std::vector<int> owners;
  const int host = host_of_[rank];
  if (members_[host].size() == 1) return owners;
  for (int owner = 0; owner < world(); ++owner) {
    if (host_of_[owner] != host && proxy(host, owner) == rank) owners.push_back(owner);
  }
  return owners;
}

std::vector<Hop> Placement::arrivals(int rank) const {
  const int host = host_of_[rank];
  const auto& here = members_[host];
  const int size = static_cast<int>(here.size());
  std::vector<Hop> hops;
  // Chunks of the host `back` places before this one that enter this host through `member`.
  const auto brought_by = [&](int back, int member) {
    const auto& there = members_[wrap(host - back, hosts())];
    for (std::size_t lane = lane_[member]; lane < there.size(); lane += here.size()) {
      hops.push_back({there[lane], member == rank ? there[lane] : member});  // see proxy
    }
  };
  for (int back = 1; back < hosts(); ++back) brought_by(back, rank);
  const auto neighbour = [&](int i) { return here[wrap(lane_[rank] - i, size)]; };
  for (int i = 1; i < size; ++i) hops.push_back({neighbour(i), neighbour(i)});
  for (int back = 1; back < hosts(); ++back) {
    for (int i = 1; i < size; ++i) brought_by(back, neighbour(i));
  }
  return hops;
}

std::vector<int> Placement::far_first(int rank, bool spread) const {
  const int host = host_of_[rank];
  const auto& here = members_[host];
  const int size = static_cast<int>(here.size());
  std::vector<int> owners;
  for (int ahead = 1; ahead < hosts(); ++ahead) {
    const auto& there = members_[wrap(host + ahead, hosts())];
    const int count = static_cast<int>(there.size());
    // `size` owners at a time, each of which has another proxy here.
    for (int begin = 0; begin < count; begin += size) {
      for (int i = 1; i <= size; ++i) {
        const int at = begin + (spread ? wrap(lane_[rank] + i, size) : i - 1);
        if (at < count) owners.push_back(there[at]);
      }
    }
  }
  for (int i = 1; i <= size; ++i) owners.push_back(here[wrap(lane_[rank] + i, size)]);
  return owners;
}

}  // namespace flux::host
