#include "schedule/grouped.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace flux::host {
namespace {

// Tiles of the rows of each expert, whose tokens are taken in the order of `spans`. Returns, by tile, the
// span of its first and of its last row.
std::vector<Range> cut(const RowMap& map, const std::vector<Range>& spans, GroupedWork* work) {
  std::vector<Range> of_tiles;
  const int tile_m = work->tile_m;
  for (int expert = 0; expert < map.experts; ++expert) {
    int in_tile = tile_m;
    for (int span = 0; span < static_cast<int>(spans.size()); ++span) {
      const Range rows = routed_rows_of(map, expert, spans[span]);
      for (int row = rows.begin; row < rows.end; ++row) {
        if (in_tile == tile_m) {
          in_tile = 0;
          work->experts.push_back(expert);
          work->rows.resize(work->experts.size() * tile_m, -1);
          work->tokens.resize(work->rows.size(), map.tokens[row]);
          work->sources.resize(work->rows.size(), row);
          of_tiles.push_back({span, span});
        }
        const std::size_t at = work->rows.size() - tile_m + in_tile++;
        work->rows[at] = row;
        work->tokens[at] = map.tokens[row];
        work->sources[at] = row;
        of_tiles.back().end = span;
      }
    }
  }
  return of_tiles;
}

// Tiles in the order of `keys`. Those of one key and expert are swept column by column, so that they share
// a column of the weight.
void put_tiles(const std::vector<int>& keys, int columns, GroupedWork* work) {
  const std::int64_t all = static_cast<std::int64_t>(keys.size()) * columns;
  if (all > kMaxTiles) {
    throw std::invalid_argument("the routed rows make " + std::to_string(all) + " tiles, at most " +
                                std::to_string(kMaxTiles) + " are possible");
  }
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] < keys[b]; });
  for (std::size_t first = 0, last; first < order.size(); first = last) {
    const auto alike = [&](int tile) {
      return keys[tile] == keys[order[first]] && work->experts[tile] == work->experts[order[first]];
    };
    for (last = first; last < order.size() && alike(order[last]);) ++last;
    for (int column = 0; column < columns; ++column) {
      for (std::size_t i = first; i < last; ++i) work->items.push_back(order[i] * columns + column);
    }
  }
}

// Bits of the ranks that have an expert of a token.
class Takers {
 public:
  Takers(const Choices& choices, int world, int ep) : choices_(choices) {
    if (ep < 1 || world > 32 || world % ep != 0) {
      throw std::invalid_argument("ep must divide a world of at most 32, got " +
                                  std::to_string(ep) + " and " + std::to_string(world));
    }
    const int parts = world / ep;
    for (int expert = 0; expert < choices.total; ++expert) {
      const int first = owner_of(choices.total, ep, expert) * parts;
      ranks_.push_back(static_cast<std::uint32_t>(((std::uint64_t{1} << parts) - 1) << first));
    }
  }
  std::uint32_t operator()(int token) const {
    std::uint32_t ranks = 0;
    for (int choice = 0; choice < choices_.topk; ++choice) {
      const std::int64_t expert = choices_.experts[std::int64_t{token} * choices_.topk + choice];
      if (expert >= 0) ranks |= ranks_[expert];
    }
    return ranks;
  }

 private:
  Choices choices_;
  std::vector<std::uint32_t> ranks_;  // by expert
};

}  // namespace

GroupedWork gather_work(const RowMap& map, const TileOrder& order, const CommTiling& comm,
                        int tile_m, int columns) {
  GroupedWork work;
  work.tile_m = tile_m;
  std::vector<Range> spans;
  for (int p = 0; p < map.world; ++p) {
    for (int tile = 0; tile < tiles_per_chunk(comm); ++tile) {
      spans.push_back(comm_tile_rows(comm, chunk_at(order, p), tile));
    }
  }
  const std::vector<Range> of_tiles = cut(map, spans, &work);
  std::vector<int> keys;
  for (const Range& of_tile : of_tiles) keys.push_back(of_tile.end);
  put_tiles(keys, columns, &work);
  work.items.push_back(-1);
  work.sources.clear();
  return work;
}

GroupedWork sum_work(const RowMap& map, const TileOrder& order, int ahead) {
  GroupedWork work;
  work.tile_m = order.tile_m;
  const int rows = tiles_m(order), columns = tiles_n(order);
  std::vector<Range> spans;
  for (int i = 0; i < rows; ++i) {
    const int first = tile_row_at(order, i) * order.tile_m;
    spans.push_back({first, min_of(order.m, first + order.tile_m)});
  }
  const std::vector<Range> of_tiles = cut(map, spans, &work);
  std::vector<int> keys;
  for (const Range& of_tile : of_tiles) keys.push_back(of_tile.begin);
  put_tiles(keys, columns, &work);

  // A sum comes `ahead` items behind the last product for it, of any column.
  std::vector<int> of_tile(work.experts.size(), -1), last(rows, -1);
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    of_tile[work.items[i] / columns] = static_cast<int>(i);
  }
  work.counts.assign(rows, 0);
  for (std::size_t row = 0; row < work.rows.size(); ++row) {
    if (work.rows[row] < 0) continue;
    const int of_sum = work.tokens[row] / work.tile_m;
    last[of_sum] = std::max(last[of_sum], of_tile[row / work.tile_m]);
    ++work.counts[of_sum];
  }
  const std::vector<int> products = std::move(work.items);
  work.items.clear();
  std::vector<int> sums(rows);
  for (int i = 0; i < rows; ++i) sums[i] = tile_row_at(order, i);
  std::stable_sort(sums.begin(), sums.end(), [&](int a, int b) { return last[a] < last[b]; });
  std::size_t next = 0;
  const auto put_sums = [&](std::int64_t reached) {
    for (; next < sums.size() && last[sums[next]] + std::int64_t{ahead} < reached; ++next) {
      for (int column = 0; column < columns; ++column) {
        work.items.push_back(-1 - (sums[next] * columns + column));
      }
    }
  };
  for (std::size_t i = 0; i < products.size(); ++i) {
    put_sums(static_cast<std::int64_t>(i));
    work.items.push_back(products[i]);
  }
  put_sums(std::int64_t{1} << 40);
  return work;
}

void add_pushes(const Choices& choices, const TileOrder& order, const CommTiling& comm, int ep,
                GroupedWork* work) {
  const int world = comm.world, own = order.rank;
  const Takers takers(choices, world, ep);
  const Range rows{row_begin(comm.m, world, own), row_end(comm.m, world, own)};
  std::vector<std::uint32_t> of_rows;
  for (int row = rows.begin; row < rows.end; ++row) of_rows.push_back(takers(row));
  std::vector<std::pair<int, int>> peers;  // when each takes the rows
  for (int peer = 0; peer < world; ++peer) {
    TileOrder theirs = order;
    theirs.rank = peer;
    int place = 0;
    while (chunk_at(theirs, place) != own) ++place;
    if (peer != own) peers.push_back({place, peer});
  }
  std::sort(peers.begin(), peers.end());
  std::vector<int> items;
  for (const auto& [place, peer] : peers) {
    for (int tile = 0; tile < tiles_per_chunk(comm); ++tile) {
      const Range of_tile = comm_tile_rows(comm, own, tile);
      if (of_tile.begin == of_tile.end) continue;
      const int begin = static_cast<int>(work->pushed.size());
      for (int row = of_tile.begin; row < of_tile.end; ++row) {
        if ((of_rows[row - rows.begin] >> peer & 1u) != 0) work->pushed.push_back(row);
      }
      const int end = static_cast<int>(work->pushed.size());
      work->pushes.insert(work->pushes.end(), {peer, signal_index(comm, own, tile), begin, end});
      items.push_back(-2 - static_cast<int>(items.size()));
    }
  }
  work->items.insert(work->items.begin(), items.begin(), items.end());
}

void add_shares(const Choices& choices, int world, int rank, int ep, GroupedWork* work) {
  const Takers takers(choices, world, ep);
  for (int row = row_begin(choices.m, world, rank); row < row_end(choices.m, world, rank); ++row) {
    work->shares.push_back(static_cast<int>(takers(row)));
  }
}

}  // namespace flux::host
