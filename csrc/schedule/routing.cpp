#include "schedule/routing.h"

#include <stdexcept>
#include <string>

namespace flux::host {
namespace {

void check(const Choices& c) {
  const std::int64_t pairs = std::int64_t{c.m} * c.topk;
  if (pairs > kMaxExtent) {
    throw std::invalid_argument("tokens times topk must be at most " + std::to_string(kMaxExtent) +
                                ", got " + std::to_string(c.m) + " * " + std::to_string(c.topk));
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (c.experts[i] < c.total) continue;
    throw std::invalid_argument("experts of tokens must be below " + std::to_string(c.total) +
                                ", got " + std::to_string(c.experts[i]) + " for token " +
                                std::to_string(i / c.topk));
  }
}

// Tells ranks with different choices apart, and guards against nothing that is made to deceive it.
std::uint32_t checksum_of(const Choices& c) {
  std::uint64_t sum = 0;
  const auto add = [&sum](std::int64_t value) {  // the steps of splitmix64
    sum += static_cast<std::uint64_t>(value) + 0x9e3779b97f4a7c15ull;
    sum = (sum ^ (sum >> 30)) * 0xbf58476d1ce4e5b9ull;
    sum = (sum ^ (sum >> 27)) * 0x94d049bb133111ebull;
    sum ^= sum >> 31;
  };
  add(c.m);
  add(c.topk);
  const std::int64_t pairs = std::int64_t{c.m} * c.topk;
  for (std::int64_t i = 0; i < pairs; ++i) add(c.experts[i] < 0 ? -1 : c.experts[i]);
  return static_cast<std::uint32_t>(sum ^ (sum >> 32));
}

}  // namespace

Routing::Routing(const Choices& c, int first_expert, int experts, int world) {
  check(c);
  checksum = checksum_of(c);
  const std::int64_t pairs = std::int64_t{c.m} * c.topk;
  const auto run_at = [&](std::int64_t pair) {  // index of its run, -1: of no expert here
    const std::int64_t expert = c.experts[pair] - first_expert;
    if (c.experts[pair] < 0 || expert < 0 || expert >= experts) return std::int64_t{-1};
    return expert * world + owner_of(c.m, world, static_cast<int>(pair / c.topk));
  };
  offsets.assign(static_cast<std::size_t>(experts) * world + 1, 0);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    if (const std::int64_t run = run_at(pair); run >= 0) ++offsets[run + 1];
  }
  for (std::size_t i = 1; i < offsets.size(); ++i) offsets[i] += offsets[i - 1];
  tokens.resize(offsets.back());
  choices.resize(offsets.back());
  rows.assign(pairs, -1);
  std::vector<int> next(offsets.begin(), offsets.end() - 1);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const std::int64_t run = run_at(pair);
    if (run < 0) continue;
    const int row = next[run]++;
    tokens[row] = static_cast<int>(pair / c.topk);
    choices[row] = pair;
    rows[pair] = row;
  }
  map = RowMap{c.m, world, experts, offsets.data(), tokens.data()};
}

}  // namespace flux::host
