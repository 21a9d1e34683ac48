// TMA: cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, of tiles.
#include <algorithm>

#include "bulk.h"
#include "engine.h"
#include "races.h"
#include "reduction.h"
#include "tensor_map.h"

namespace ptx_machine {
namespace {

// Alignment of a box in shared memory, with swizzles too: they go by bits of the address, so that a box
// that starts within their pattern lies differently but is a valid one.
constexpr std::uint64_t kAlign = 128;

using Coordinates = std::array<std::int64_t, kMaxRank>;

struct Box {
  TensorMap map;
  Coordinates first{};
};

// Reads the map and the coordinates behind operand `number`.
Box box_of(Context& c, const Op& op, int number, Mask mask, int lane) {
  Box box;
  const Lanes base = read(c, op, number, mask);
  const std::uint64_t address = address_of(op, number, base, lane);
  std::uint8_t bytes[sizeof(TensorMap)];
  for (std::uint64_t half = 0; half < 2; ++half) {  // aligned to 64 bytes, not to its size
    std::memcpy(bytes + 64 * half, at(c, op, lane, Space::kGeneric, address + 64 * half, 64), 64);
  }
  const std::string problem = read_tensor_map(bytes, &box.map);
  if (!problem.empty()) c.fail(op, lane, problem);
  note_map(c, op, lane, address, sizeof(TensorMap));
  const int rank = op.number;
  if (box.map.rank != rank) {
    c.fail(op, lane,
           "a tensor map of " + std::to_string(box.map.rank) + " dimensions for a copy of " +
               std::to_string(rank));
  }
  for (int i = 0; i < rank; ++i) {
    box.first[i] = static_cast<std::int32_t>(read(c, op, number + 1 + i, mask)[lane]);
  }
  return box;
}

// A run of elements of one row of a box that lie in the tensor.
struct Run {
  std::uint64_t offset;   // in the box, bytes
  std::uint64_t address;  // in global memory
  std::uint64_t bytes;
};

// Calls f for each row of a box of which something is inside of the tensor.
template <class F>
void each_run(const Box& box, F&& f) {
  const TensorMap& map = box.map;
  const auto width = static_cast<std::uint64_t>(map.element_bytes());
  const std::int64_t size = static_cast<std::int64_t>(map.sizes[0]);
  const std::int64_t begin = std::max<std::int64_t>(0, -box.first[0]);
  const std::int64_t end = std::min<std::int64_t>(map.box[0], size - box.first[0]);
  if (begin >= end) return;
  const std::uint64_t rows = map.rows(), row_bytes = map.row_bytes();
  for (std::uint64_t row = 0; row < rows; ++row) {
    std::uint64_t rest = row;
    std::uint64_t address = map.address + static_cast<std::uint64_t>(box.first[0] + begin) * width;
    bool inside = true;
    for (int i = 1; i < map.rank; ++i) {
      const std::int64_t at =
          box.first[i] + static_cast<std::int64_t>(rest % map.count(i)) * map.steps[i];
      rest /= map.count(i);
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.sizes[i]);
      if (inside) address += static_cast<std::uint64_t>(at) * map.strides[i];
    }
    if (!inside) continue;
    f(Run{row * row_bytes + static_cast<std::uint64_t>(begin) * width, address,
          static_cast<std::uint64_t>(end - begin) * width});
  }
}

// What elements outside of the tensor are loaded as. PTX names a special NaN without its bits; this is
// a quiet one.
Bytes filled(const TensorMap& map) {
  Bytes data(map.bytes());
  if (map.fills_nan == 0) return data;
  const int width = map.element_bytes();
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<int>(i % width) == width - 1 ? 0x7F : 0xFF;
  }
  return data;
}

// Copies a box between its packed form and shared memory, by chunks of 16 bytes.
template <bool kToShared, class B>
void swizzle(const TensorMap& map, const Place& place, B& data) {
  std::uint8_t* shared = place.block->shared.data();
  for (std::uint64_t i = 0; i < data.size(); i += 16) {
    std::uint8_t* chunk = shared + map.swizzled(place.offset + i);
    if constexpr (kToShared) {
      std::memcpy(chunk, data.data() + i, 16);
    } else {
      std::memcpy(data.data() + i, chunk, 16);
    }
  }
}

// Where a box lies in shared memory. A swizzle may reach beyond its end, in the last chunks of a line.
Place place_of(Context& c, const Op& op, Space space, std::uint64_t address, int lane,
               const TensorMap& map) {
  const std::uint64_t bytes = map.bytes();
  const std::uint64_t needed = map.swizzle == 0 ? bytes : (bytes + kAlign - 1) / kAlign * kAlign;
  return shared_range(c, op, lane, space, address, needed, kAlign);
}

// CUDA programming guide, tensor memory access: what a store has outside of the tensor is left out, but
// its first element must not lie before the tensor in any dimension.
void check_corner(const Context& c, const Op& op, int lane, const Box& box) {
  for (std::size_t i = 0; i < box.map.rank; ++i) {
    if (box.first[i] >= 0) continue;
    c.fail(op, lane,
           "a store begins at the negative coordinate " + std::to_string(box.first[i]) +
               " of dimension " + std::to_string(i));
  }
}

// The two sides of a copy, as accesses.
// Writes may go to a multicast address.
void note_tensor(Context& c, const Op& op, int lane, const Box& box, Use use,
                 const Completion& done) {
  std::vector<std::uint64_t> places;
  std::uint64_t bytes = 0;  // the same in each row
  each_run(box, [&](const Run& run) {
    places.push_back(run.address);
    bytes = run.bytes;
  });
  if (use != Use::kRead) return note_stored(c, op, lane, places, bytes, use, done);
  note_async(c, op, lane, nullptr, places, bytes, use, done);
}
void note_box(Context& c, const Op& op, int lane, const TensorMap& map, const Place& place, Use use,
              const Completion& done) {
  std::vector<std::uint64_t> chunks((map.bytes() + 15) / 16);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    chunks[i] = map.swizzled(place.offset + 16 * i);
  }
  const std::uint32_t swizzle = use == Use::kRead ? 0 : map.swizzle;
  note_async(c, op, lane, place.block, chunks, 16, use, done, false, swizzle);
}

// [target], [map, {coordinates}], [mbarrier] {, mask of ranks} {, policy}
Outcome load_box(Context& c, const Op& op, Mask mask) {
  const Lanes target = read(c, op, 0, mask);
  const int behind = 2 + op.number;
  const Lanes ranks = op.flag ? read(c, op, behind + 1, mask) : Lanes{};
  each(mask, [&](int l) {
    const Box box = box_of(c, op, 1, mask, l);
    const Place to = place_of(c, op, op.space, address_of(op, 0, target, l), l, box.map);
    const Place counter = mbarrier_of(c, op, behind, mask, l, to);
    for (Block* block : receivers(c, op, l, to, op.flag ? &ranks : nullptr)) {
      Transfer transfer;
      transfer.target = block;
      transfer.mbarrier = {block, counter.offset};
      transfer.reported = box.map.bytes();  // of the whole box, wherever it lies
      const Completion done = completion_of({block, counter.offset});
      note_tensor(c, op, l, box, Use::kRead, done);
      note_box(c, op, l, box.map, {block, to.offset}, Use::kWrite, done);
      const Origin origin{&op, c.thread_of(l), c.warp->block->index};
      transfer.read = [=](Context& later, Bytes& data) {
        data = filled(box.map);
        each_run(box, [&](const Run& run) {
          std::memcpy(data.data() + run.offset, global(later, origin, run.address, run.bytes),
                      run.bytes);
          convert_elements(box.map, data.data() + run.offset, run.bytes);
        });
      };
      transfer.write = [map = box.map, at = Place{block, to.offset}](Context&, const Bytes& data) {
        swizzle<true>(map, at, data);
      };
      c.engine->start(c, op, l, std::move(transfer));
    }
  });
  return Outcome::kNext;
}

// Integers of a map take part in and, or and xor as their bits.
Reducer reducer_of(const TensorMap& map, Action action) {
  const bool bitwise = action == kAnd || action == kOr || action == kXor;
  const Type type = element_type(map.type)->type;
  if (!bitwise || is_float(type)) return ptx_machine::reducer_of(action, type);
  return ptx_machine::reducer_of(action, bytes_of(type) == 4   ? Type::kB32
                                         : bytes_of(type) == 8 ? Type::kB64
                                                               : type);
}

// [map, {coordinates}], [source] {, policy}, as copy or as reduction by the type of the map (op.flag)
Outcome store_box(Context& c, const Op& op, Mask mask) {
  const int behind = 1 + op.number;
  const Lanes source = read(c, op, behind, mask);
  std::optional<Box> first;  // of the lanes
  std::uint64_t first_source = 0;
  each(mask, [&](int l) {
    const Box box = box_of(c, op, 0, mask, l);
    const Place from =
        place_of(c, op, Space::kShared, address_of(op, behind, source, l), l, box.map);
    check_corner(c, op, l, box);
    Reducer reduce = nullptr;
    if (op.flag) {
      reduce = reducer_of(box.map, static_cast<Action>(op.position));
      if (reduce == nullptr) c.fail(op, l, "no such reduction of the type of the tensor map");
    }
    Transfer transfer;
    join_group(c, l, transfer);
    // CUTLASS has all lanes of a warp start the same store: the same bytes are no conflict.
    const bool again = first && first->first == box.first && first->map.check == box.map.check &&
                       address_of(op, behind, source, l) == first_source;
    if (!again) {
      note_box(c, op, l, box.map, from, Use::kRead, bulk_reads(c, l));
      note_tensor(c, op, l, box, op.flag ? Use::kAtomic : Use::kWrite, bulk_writes(c, l));
    }
    if (!first) {
      first = box;
      first_source = address_of(op, behind, source, l);
    }
    transfer.bytes = box.map.bytes();
    transfer.source = from.block;
    transfer.read = [map = box.map, from](Context&, Bytes& data) {
      data.resize(map.bytes());
      swizzle<false>(map, from, data);
    };
    const Origin origin{&op, c.thread_of(l), c.warp->block->index};
    transfer.write = [=](Context& later, const Bytes& data) {
      const auto width = static_cast<std::uint64_t>(box.map.element_bytes());
      each_run(box, [&](const Run& run) {
        const std::uint8_t* by = data.data() + run.offset;
        for (const std::uint64_t place : places_of(*later.memory, run.address)) {
          std::uint8_t* to = global(later, origin, place, run.bytes);
          if (reduce == nullptr) std::memcpy(to, by, run.bytes);
          for (std::uint64_t i = 0; reduce != nullptr && i < run.bytes; i += width) {
            reduce(to + i, by + i);
          }
        }
      });
    };
    c.engine->start(c, op, l, std::move(transfer));
  });
  return Outcome::kNext;
}

// Hints: only the map is read.
Outcome prefetch_box(Context& c, const Op& op, Mask mask) {
  each(mask, [&](int l) { box_of(c, op, 0, mask, l); });
  return Outcome::kNext;
}

Outcome prefetch_map(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  each(mask, [&](int l) { at(c, op, l, op.space, address_of(op, 0, base, l), 64); });
  return Outcome::kNext;
}

int rank_of(const Statement& s) {
  constexpr const char* kRanks[] = {"1d", "2d", "3d", "4d", "5d"};
  for (int i = 0; i < kMaxRank; ++i) {
    if (has(s, kRanks[i])) return i + 1;
  }
  return 0;
}

// The modifiers of a copy but its number of dimensions, which comes behind .tensor.
bool are_known(const Statement& s, std::initializer_list<const char*> known) {
  std::vector<std::string> others = s.opcode;
  std::erase_if(others, [&](const std::string& m) { return m.size() == 2 && m[1] == 'd'; });
  Statement without;
  without.opcode = std::move(others);
  return has_no_other(without, known);
}

bool has_operands(const Statement& s, std::size_t map, std::size_t count) {
  const std::size_t hint = has(s, "L2::cache_hint") ? 1 : 0;
  if (s.operands.size() != count + hint) return false;
  const Operand& o = s.operands[map];
  return o.kind == Operand::Kind::kAddress && o.parts.size() == 1 &&
         o.parts[0].parts.size() == static_cast<std::size_t>(rank_of(s));
}

bool decode_load(const Statement& s, Op& op) {
  const bool own = s.opcode[5] == "shared::cta";
  op.space = own ? Space::kShared : Space::kCluster;
  op.flag = has(s, "multicast::cluster");
  op.handler = load_box;
  return s.opcode[6] == "global" && (own || s.opcode[5] == "shared::cluster") &&
         has(s, "mbarrier::complete_tx::bytes") && !(own && op.flag) &&
         has_operands(s, 1, op.flag ? 4 : 3) &&
         are_known(s,
                   {"async", "bulk", "tensor", "shared::cluster", "shared::cta", "global", "tile",
                    "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint"});
}

bool decode_store(const Statement& s, Op& op) {
  op.flag = s.opcode[1] == "reduce";
  op.position = action_of(s);
  op.handler = store_box;
  return op.flag == (op.position >= 0) && has(s, "bulk_group") && has_operands(s, 0, 2) &&
         are_known(s, {"async", "bulk", "tensor", "shared::cta", "global", "tile", "bulk_group",
                       "L2::cache_hint", "reduce", "add", "min", "max", "inc", "dec", "and", "or",
                       "xor"});
}

}  // namespace

bool decode_tensor(const Statement& s, Op& op) {
  op.written = 0;
  if (s.opcode[0] == "prefetch" && has(s, "tensormap")) {
    op.space = Space::kGeneric;
    op.handler = prefetch_map;
    return has_no_other(s, {"tensormap", "param", "const"});
  }
  if (s.opcode[0] != "cp" || !has(s, "tensor") || s.opcode.size() < 7) return false;
  op.number = rank_of(s);
  if (op.number == 0) return false;
  if (has(s, "prefetch")) {
    op.handler = prefetch_box;
    return has_operands(s, 0, 1) && are_known(s, {"async", "bulk", "prefetch", "tensor", "L2",
                                                  "global", "tile", "L2::cache_hint"});
  }
  const std::size_t first = s.opcode[1] == "reduce" ? 6 : 5;
  if (s.opcode[first] == "global" && s.opcode[first + 1] == "shared::cta")
    return decode_store(s, op);
  return s.opcode[1] != "reduce" && decode_load(s, op);
}

}  // namespace ptx_machine
