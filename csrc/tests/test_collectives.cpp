// Collectives between ranks that are threads: random layouts, sizes and rounds, with and without a
// caller that computes between rounds for longer than the Mover sleeps.
//   test_collectives CALLS [SEED]
#include <fcntl.h>
#include <sys/socket.h>

#include <cstring>

#include "cpu/collectives.h"
#include "tests/harness.h"

namespace flux::host::test {
namespace {

constexpr std::size_t kColumns = 24;  // floats of a row
constexpr std::size_t kRow = kColumns * sizeof(float);
constexpr std::size_t kSlot = 8 << 10;
constexpr int kMostRows = 12000;  // 1.1 MB: more than the kernel buffers of a socket pair hold

struct Case {
  Collective kind;
  int rows;
  std::size_t round_rows;  // of each rank; 0: the caller computes before or after
  bool in_place;
  std::size_t block_columns;  // of an AllReduce; 0: none
  bool biased;
};

// Small integers: sums are exact.
float value_of(int call, int rank, std::size_t element) {
  return static_cast<float>((static_cast<std::size_t>(call * 37 + rank * 131) + element * 7) % 251);
}

float bias_of(std::size_t column) { return static_cast<float>(column * 3); }

// Which element of whole rows is where in a vector of blocks.
std::size_t element_at(std::size_t index, std::size_t rows, std::size_t block) {
  if (block == 0) return index;
  std::size_t first = 0, width = std::min(block, kColumns);
  while (index >= rows * width) {
    index -= rows * width;
    first += width;
    width = std::min(block, kColumns - first);
  }
  return index / width * kColumns + first + index % width;
}

class Ranks {
 public:
  explicit Ranks(const std::vector<int>& host_of)
      : host_of_(host_of),
        world_(static_cast<int>(host_of.size())),
        fabric_(world_, 1, Collectives::data_bytes(kSlot, true)) {
    const Placement placement(host_of);
    std::vector<std::vector<int>> descriptors(host_of.size(), std::vector<int>(host_of.size(), -1));
    for (int rank = 0; rank < world_; ++rank) {
      for (const int peer : Collectives::partners(placement, rank)) {
        if (peer < rank) continue;
        int pair[2];
        CHECK_TRUE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
        descriptors[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)] = pair[0];
        descriptors[static_cast<std::size_t>(peer)][static_cast<std::size_t>(rank)] = pair[1];
      }
    }
    for (int rank = 0; rank < world_; ++rank) {
      ranks_.push_back(std::make_unique<Collectives>(
          rank, host_of, fabric_.symmetric.pads, fabric_.symmetric.data,
          descriptors[static_cast<std::size_t>(rank)], nullptr, nullptr, kSlot));
    }
  }

  void call(int number, const Case& what, unsigned seed) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_; ++rank) {
      threads.emplace_back([=] { run(rank, number, what, seed); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void run(int rank, int number, const Case& what, unsigned seed) {
    std::mt19937 rng(seed * 31 + static_cast<unsigned>(rank));
    const std::size_t rows = static_cast<std::size_t>(what.rows), world = host_of_.size();
    const std::size_t chunk = (rows + world - 1) / world;
    CollectiveCall call;
    call.kind = what.kind;
    call.number = static_cast<std::uint64_t>(number);
    call.digest = static_cast<std::uint32_t>(what.rows);
    call.columns = kColumns;
    call.timeout = std::chrono::seconds(60);
    for (std::size_t r = 0; r <= world; ++r) {
      call.offsets.push_back(std::min(rows, chunk * r) * kRow);
    }
    const std::size_t own = call.offsets[static_cast<std::size_t>(rank)];
    const std::size_t own_end = call.offsets[static_cast<std::size_t>(rank) + 1];
    const bool gathers = what.kind == Collective::kAllGather;
    const bool sums_all = what.kind == Collective::kAllReduce;
    const std::size_t block = sums_all ? what.block_columns : 0;
    std::vector<float> bias(kColumns);
    for (std::size_t c = 0; c < kColumns; ++c)
      bias[c] = gathers || !what.biased ? 0.0f : bias_of(c);
    if (what.biased) call.bias = reinterpret_cast<const char*>(bias.data());
    call.block_columns = block;
    if (sums_all) {
      for (std::size_t r = 1; r <= world; ++r) call.offsets[r] = rows * kRow;
    }
    // Each of its exact size, for AddressSanitizer.
    std::vector<float> in(((gathers ? own_end - own : rows * kRow)) / sizeof(float), -1.0f);
    std::vector<float> out((what.kind == Collective::kReduceScatter ? own_end - own : rows * kRow) /
                           sizeof(float));
    const auto fill = [&](std::size_t begin, std::size_t end) {
      const std::size_t base = gathers ? own / sizeof(float) : 0;
      for (std::size_t i = begin / sizeof(float); i < end / sizeof(float); ++i) {
        in[i - base] = value_of(number, rank, element_at(i, rows, block));
      }
    };
    std::size_t computed = 0;
    const auto compute = [&](std::size_t begin, std::size_t end) {
      if (!gathers) fill(begin, end);
      computed += end - begin;
      if (draw(rng) == 0) std::this_thread::sleep_for(milliseconds(2));
    };
    int waits = 0;
    call.meanwhile = [&] { ++waits; };
    if (gathers) fill(own, own_end);
    if (what.round_rows == 0) {
      if (!gathers) fill(0, rows * kRow);
    } else {
      call.round_bytes = what.round_rows * kRow * (sums_all ? world : 1);
      (gathers ? call.consume : call.produce) = compute;
    }
    call.in = reinterpret_cast<const char*>(in.data());
    const bool in_place = what.in_place && sums_all && block == 0;
    call.out = reinterpret_cast<char*>((in_place ? in : out).data());
    const Outcome outcome =
        ranks_[static_cast<std::size_t>(rank)]->run(call, [] { return false; }, nullptr);
    CHECK_TRUE(outcome == Outcome::kDone, "rank " + to_string(rank) + " call " + to_string(number) +
                                              ": outcome " + to_string(static_cast<int>(outcome)));
    CHECK_TRUE(waits == 1, "meanwhile was called " + to_string(waits) + " times");
    CHECK_TRUE(what.round_rows == 0 || computed == rows * kRow,
               "bytes computed: " + to_string(computed) + " of " + to_string(rows * kRow));
    const std::vector<float>& result = in_place ? in : out;
    const std::size_t base = what.kind == Collective::kReduceScatter ? own / sizeof(float) : 0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      float expected = bias[i % kColumns];
      if (gathers) {
        expected = value_of(number, static_cast<int>(i / kColumns / chunk), i);
      } else {
        for (int r = 0; r < world_; ++r) expected += value_of(number, r, base + i);
      }
      CHECK_TRUE(result[i] == expected, "rank " + to_string(rank) + " call " + to_string(number) +
                                            " element " + to_string(i));
    }
  }

  static int draw(std::mt19937& rng) { return std::uniform_int_distribution<int>(0, 7)(rng); }

  const std::vector<int> host_of_;
  const int world_;
  Fabric fabric_;
  std::vector<std::unique_ptr<Collectives>> ranks_;
};

void run(int calls, unsigned seed) {
  const std::vector<std::vector<int>> layouts = {{0, 1},       {0, 1, 2},    {0, 0, 1},
                                                 {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0}};
  for (const std::vector<int>& host_of : layouts) {
    Ranks ranks(host_of);
    std::mt19937 rng(seed);
    const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng); };
    for (int number = 1; number <= calls; ++number) {
      const int rows = 1 + below(below(3) == 0 ? kMostRows : 60);
      const Case what{static_cast<Collective>(below(3)),
                      rows,
                      below(3) == 0 ? 0 : static_cast<std::size_t>(1 + below(rows)),
                      below(2) == 0,
                      below(2) == 0 ? 0 : static_cast<std::size_t>(1 + below(kColumns)),
                      below(2) == 0};
      ranks.call(number, what, seed + static_cast<unsigned>(number));
    }
  }
}

}  // namespace
}  // namespace flux::host::test

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 40;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  flux::host::test::run(calls, seed);
  std::printf("%d calls on each layout\n", calls);
  return 0;
}
