// Races: thousands of back-to-back calls with changing shapes and knobs, random delays and checked
// data. tests/project/test_tsan.py builds this with and without ThreadSanitizer and runs it:
//   a.out faults | CALLS [SEED]
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/harness.h"

namespace flux::host::test {

void run_fault_tests();  // test_engine_faults.cpp

namespace {

constexpr int kMaxM = 24;
constexpr int kColumns = 19;  // floats of a row that travels
constexpr std::size_t kRowBytes = kColumns * sizeof(float);
constexpr std::chrono::seconds kTimeout{60};

int draw(std::mt19937& rng, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(rng);
}

Plan draw_plan(OpKind op, int world, std::mt19937& rng) {
  Plan p{};
  p.op = op;
  p.m = draw(rng, 0, 3) == 0 ? draw(rng, 1, world) : draw(rng, 1, kMaxM);
  p.n = op == OpKind::kAGGemm ? draw(rng, 1, 3) : kColumns;
  std::vector<Mesh> meshes;
  for (int nodes = 1; nodes <= world; ++nodes) {
    for (int domains = 1; domains <= world; ++domains) {
      if (world % (nodes * domains) == 0) {
        meshes.push_back(Mesh{nodes, domains, world / (nodes * domains)});
      }
    }
  }
  p.mesh = meshes[draw(rng, 0, static_cast<int>(meshes.size()) - 1)];
  const int chunk = chunk_rows(p.m, world);
  p.store = static_cast<Store>(draw(rng, 0, 1));
  p.tile_m = draw(rng, 1, p.m);
  if (op != OpKind::kAGGemm && p.store == Store::kDirect) {
    do p.tile_m = draw(rng, 1, chunk);
    while (chunk % p.tile_m != 0);
  }
  p.tile_n = draw(rng, 1, p.n);
  p.raster = draw(rng, 1, 3);
  p.comm_rows = draw(rng, 1, chunk);
  p.direction = static_cast<Direction>(draw(rng, 0, 1));
  p.order = static_cast<Order>(draw(rng, 0, 4));
  p.swizzle = static_cast<Swizzle>(draw(rng, 0, is_power_of_two(world) ? 2 : 1));
  return p;
}

// Small integers: sums are exact in any order, and a value of another call, rank, row or column
// differs.
float value_of(std::uint32_t epoch, int rank, int row, int column) {
  return static_cast<float>((epoch % 1000 * 37 + static_cast<unsigned>(rank) * 131 +
                             static_cast<unsigned>(row) * 17 + static_cast<unsigned>(column)) %
                            1021);
}

float bias_of(int column) { return static_cast<float>(column) + 0.5f; }

std::string place(const char* what, std::uint32_t epoch, int rank, int row, int column, float got,
                  float expected) {
  return std::string(what) + " of call " + to_string(epoch) + " at rank " + to_string(rank) +
         " row " + to_string(row) + " column " + to_string(column) + " is " + to_string(got) +
         ", expected " + to_string(expected);
}

// One rank that makes call after call.
class Caller {
 public:
  Caller(const Symmetric& symmetric, int rank, std::uint32_t start, int seed)
      : world_(static_cast<int>(symmetric.pads.size())),
        rank_(rank),
        symmetric_(symmetric),
        engine_(rank, symmetric),
        rng_(static_cast<unsigned>(seed * 64 + rank)) {
    engine_.set_epoch(start);
    for (int c = 0; c < kColumns; ++c) bias_.push_back(bias_of(c));
  }

  void call(const Plan& plan) {
    const bool threaded = draw(rng_, 0, 1) == 1;  // drawn by each rank
    const bool slow = draw(rng_, 0, 7) == 0;
    engine_.set_delay(std::chrono::microseconds(slow ? draw(rng_, 1, 300) : 0), rng_());
    if (draw(rng_, 0, 15) == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    const auto schedule = plan.schedule(rank_);
    const bool traced = draw(rng_, 0, 3) == 0;  // drawn by each rank; results do not depend on it
    if (traced) engine_.trace(Lanes{&of_caller_, &of_worker_});
    if (plan.op == OpKind::kAGGemm) {
      gather(plan, schedule, threaded);
    } else {
      reduce(plan, schedule, threaded);
    }
    if (!traced) return;
    engine_.trace(Lanes{});
    CHECK_TRUE(world_ == 1 || of_caller_.count() + of_worker_.count() > 0, "nothing was recorded");
    check_and_clear(of_caller_);
    check_and_clear(of_worker_);
  }

 private:
  // Checks that records come one after the other, and that all are of this call.
  void check_and_clear(Lane& lane) {
    std::int64_t end = 0;
    for (std::size_t i = 0; i < lane.count(); ++i) {
      CHECK_TRUE(end <= lane[i].begin_ns && lane[i].begin_ns <= lane[i].end_ns,
                 "record " + to_string(i));
      CHECK_TRUE(lane[i].call == engine_.epoch(), "record " + to_string(i));
      end = lane[i].end_ns;
    }
    lane.clear();
  }

  void require(bool ok) { CHECK_TRUE(ok, describe(engine_)); }

  void gather(const Plan& plan, const std::shared_ptr<const Schedule>& schedule, bool threaded) {
    const std::uint32_t epoch = engine_.epoch() + 1;
    const int begin = row_begin(plan.m, world_, rank_);
    const int own = row_count(plan.m, world_, rank_);
    const int stride = kColumns + draw(rng_, 0, 2);
    std::vector<float> x(static_cast<std::size_t>(std::max(own * stride, 1)), -1.0f);
    for (int i = 0; i < own; ++i) {
      for (int c = 0; c < kColumns; ++c) x[i * stride + c] = value_of(epoch, 0, begin + i, c);
    }
    Buffers buffers;
    buffers.x = reinterpret_cast<const char*>(x.data());
    buffers.x_stride = static_cast<std::size_t>(stride) * sizeof(float);
    engine_.begin(schedule, buffers, static_cast<std::uint32_t>(plan.m), threaded, kTimeout);
    if (!threaded) require(complete_call(engine_, kTimeout));
    const float* gathered = reinterpret_cast<const float*>(symmetric_.data[rank_]);
    for (int i = 0; i < static_cast<int>(schedule->visits.size()); ++i) {
      const Visit& v = schedule->visits[i];
      require(complete_visit(engine_, i, kTimeout));
      for (int row = v.rows.begin; row < v.rows.end; ++row) {
        const float* a = v.owner == rank_ ? &x[(row - begin) * stride] : gathered + row * kColumns;
        for (int c = 0; c < kColumns; ++c) {
          const float expected = value_of(epoch, 0, row, c);
          CHECK_TRUE(a[c] == expected, place("input", epoch, rank_, row, c, a[c], expected));
        }
      }
    }
    if (threaded) require(complete_call(engine_, kTimeout));
  }

  // Address to which the partial result of `row` is written.
  float* target(const Plan& plan, const Schedule& schedule, int row, float* partial, float* out) {
    if (plan.store == Store::kStaged) return partial + row * kColumns;
    const int owner = owner_of(plan.m, world_, row);
    const int offset = row - row_begin(plan.m, world_, owner);
    if (owner == rank_) return out + (plan.op == OpKind::kGemmAR ? row : offset) * kColumns;
    const Home home = schedule.homes[owner];
    char* block =
        symmetric_.data[home.holder] + static_cast<std::size_t>(home.block) * symmetric_.slot_bytes;
    return reinterpret_cast<float*>(block) + offset * kColumns;
  }

  void reduce(const Plan& plan, const std::shared_ptr<const Schedule>& schedule, bool threaded) {
    const std::uint32_t epoch = engine_.epoch() + 1;
    const bool all = plan.op == OpKind::kGemmAR;
    const bool direct = plan.store == Store::kDirect;
    const bool with_bias = plan.m % 2 == 0;
    const int first = all ? 0 : row_begin(plan.m, world_, rank_);
    const int rows = all ? plan.m : row_count(plan.m, world_, rank_);
    std::vector<float> out(static_cast<std::size_t>(std::max(rows, 1) * kColumns), std::nanf(""));
    std::vector<float> partial(static_cast<std::size_t>(plan.m * kColumns), std::nanf(""));
    Buffers buffers;
    buffers.partial = reinterpret_cast<char*>(partial.data());
    buffers.out = reinterpret_cast<char*>(out.data());
    buffers.bias = with_bias ? reinterpret_cast<const char*>(bias_.data()) : nullptr;
    buffers.scale = plan.m % 3 == 0 ? 0.5 : 1.0;
    engine_.begin(schedule, buffers, static_cast<std::uint32_t>(plan.m), threaded, kTimeout);
    if (direct) require(complete_entries(engine_, kTimeout));
    for (int i = 0; i < static_cast<int>(schedule->visits.size()); ++i) {
      const Visit& v = schedule->visits[i];
      for (int row = v.rows.begin; row < v.rows.end; ++row) {
        float* to = target(plan, *schedule, row, partial.data(), out.data());
        for (int c = v.cols.begin; c < v.cols.end; ++c) to[c] = value_of(epoch, rank_, row, c);
      }
      engine_.visit_done(i);
    }
    require(complete_call(engine_, kTimeout));
    for (int row = first; row < first + rows; ++row) {
      for (int c = 0; c < kColumns; ++c) {
        float expected = 0;
        for (int source = 0; source < world_; ++source) expected += value_of(epoch, source, row, c);
        expected = expected * static_cast<float>(buffers.scale) + (with_bias ? bias_of(c) : 0.0f);
        const float got = out[(row - first) * kColumns + c];
        CHECK_TRUE(got == expected, place("output", epoch, rank_, row, c, got, expected));
      }
    }
  }

  const int world_;
  const int rank_;
  const Symmetric symmetric_;
  Lane of_caller_{16};  // sometimes too few
  Lane of_worker_{16};
  Engine engine_;
  std::mt19937 rng_;
  std::vector<float> bias_;
};

void race(OpKind op, int world, int calls, std::uint32_t start, int seed) {
  // The layout of CpuBackend: the gathered input, or blocks of partials and then the result. There
  // is room for the largest number of blocks and signals of any mesh of this number of ranks.
  const std::size_t slot = static_cast<std::size_t>(chunk_rows(kMaxM, world)) * kRowBytes;
  const std::size_t slots = static_cast<std::size_t>(world * world) * slot;
  const std::size_t data = op == OpKind::kAGGemm ? kMaxM * kRowBytes : slots + kMaxM * kRowBytes;
  Fabric fabric(world, (world + 1) * signal_count(CommTiling{kMaxM, world, 1}), data);
  fabric.symmetric.row_bytes = kRowBytes;
  fabric.symmetric.slot_bytes = slot;
  fabric.symmetric.result_offset = op == OpKind::kAGGemm ? 0 : slots;
  fabric.pretend_epoch(start);
  on_all_ranks(world, [&](int rank) {
    Caller caller(fabric.symmetric, rank, start, seed);
    std::mt19937 common(static_cast<unsigned>(seed));
    for (int i = 0; i < calls; ++i) caller.call(draw_plan(op, world, common));
    // A rank that has finished leaves at once, while others may still be at work.
  });
}

}  // namespace
}  // namespace flux::host::test

int main(int argc, char** argv) {
  using namespace flux;
  using namespace flux::host::test;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s faults | CALLS [SEED]\n", argv[0]);
    return 2;
  }
  if (std::string(argv[1]) == "faults") {
    run_fault_tests();
    std::printf("ok\n");
    return 0;
  }
  const int calls = std::atoi(argv[1]);
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  for (const OpKind op : {OpKind::kAGGemm, OpKind::kGemmRS, OpKind::kGemmAR}) {
    for (int world = 1; world <= 4; ++world) {
      race(op, world, world == 1 ? calls / 10 + 1 : calls, 0, seed * 16 + world);
    }
    // Across the wrap-around of the epoch, and with the very first call at epoch 0.
    race(op, 2, 80, 0xffffffffu - 40, seed);
    for (int i = 0; i < 4; ++i) race(op, 2, 2, 0xffffffffu, seed + i);
  }
  std::printf("ok\n");
  return 0;
}
