// Bulk copies of bytes: cp.async.bulk, cp.reduce.async.bulk, their groups, st.async and red.async.
#include "bulk.h"

#include "engine.h"
#include "races.h"
#include "reduction.h"

namespace ptx_machine {

Place mbarrier_of(Context& c, const Op& op, int number, Mask mask, int lane, const Place& target) {
  const Lanes& base = read(c, op, number, mask);
  const Place place = shared_range(c, op, lane, op.space, address_of(op, number, base, lane), 8, 8);
  if (place.block != target.block) {
    c.fail(op, lane, "the mbarrier is not in the block that the copy goes to");
  }
  touch_mbarrier(c, op, lane, {place.block, place.offset}, Use::kAtomic);
  return place;
}

std::vector<Block*> receivers(Context& c, const Op& op, int lane, const Place& target,
                              const Lanes* masks) {
  if (masks == nullptr) return {target.block};
  const auto& blocks = c.warp->block->cluster->blocks;
  std::vector<Block*> found;
  for (std::size_t rank = 0; rank < 16; ++rank) {
    if (((*masks)[lane] >> rank & 1) == 0) continue;
    if (rank >= blocks.size()) {
      c.fail(op, lane,
             "multicast to rank " + std::to_string(rank) + " of a cluster of " +
                 std::to_string(blocks.size()) + " blocks");
    }
    if (blocks[rank]->running == 0) {
      c.fail(op, lane, "multicast to block " + std::to_string(rank) + ", which has ended");
    }
    found.push_back(blocks[rank].get());
  }
  return found;
}

void join_group(Context& c, int lane, Transfer& transfer) {
  transfer.owner = c.warp;
  transfer.lane = lane;
  transfer.group = c.warp->bulk_groups[lane];
}

namespace {

constexpr std::uint64_t kChunk = 16;  // bytes: what addresses and sizes are multiples of

std::uint8_t* shared_memory(const Place& place) {
  return place.block->shared.data() + place.offset;
}

void check_size(Context& c, const Op& op, int lane, std::uint64_t bytes) {
  if (bytes % kChunk == 0) return;
  c.fail(op, lane, "a size of " + std::to_string(bytes) + " bytes is no multiple of 16");
}

void check_global_address(Context& c, const Op& op, int lane, std::uint64_t address) {
  if (address % kChunk == 0) return;
  c.fail(op, lane, "global address " + std::to_string(address) + " is not aligned to 16 bytes");
}

// [target], [source], size, [mbarrier] {, mask of ranks} {, policy}
Outcome load_bytes(Context& c, const Op& op, Mask mask) {
  const Lanes target = read(c, op, 0, mask), source = read(c, op, 1, mask);
  const Lanes sizes = read(c, op, 2, mask);
  const Lanes ranks = op.flag ? read(c, op, 4, mask) : Lanes{};
  each(mask, [&](int l) {
    const std::uint64_t from = address_of(op, 1, source, l), bytes = cut(sizes[l], 4);
    check_size(c, op, l, bytes);
    check_global_address(c, op, l, from);
    const Place to = shared_range(c, op, l, op.space, address_of(op, 0, target, l), bytes, kChunk);
    const Place counter = mbarrier_of(c, op, 3, mask, l, to);
    for (Block* block : receivers(c, op, l, to, op.flag ? &ranks : nullptr)) {
      Transfer transfer;
      transfer.target = block;
      transfer.mbarrier = {block, counter.offset};
      transfer.reported = bytes;
      const Completion done = completion_of({block, counter.offset});
      note_async(c, op, l, {nullptr, from}, bytes, Use::kRead, done);
      note_async(c, op, l, {block, to.offset}, bytes, Use::kWrite, done);
      const Origin origin{&op, c.thread_of(l), c.warp->block->index};
      transfer.read = [=](Context& later, Bytes& data) {
        const std::uint8_t* begin = global(later, origin, from, bytes);
        data.assign(begin, begin + bytes);
      };
      transfer.write = [=, at = Place{block, to.offset}](Context&, const Bytes& data) {
        std::memcpy(shared_memory(at), data.data(), data.size());
      };
      c.engine->start(c, op, l, std::move(transfer));
    }
  });
  return Outcome::kNext;
}

// The shared memory of the block that a copy reads.
void read_from(Transfer& transfer, const Place& from, std::uint64_t bytes) {
  transfer.source = from.block;
  transfer.read = [=](Context&, Bytes& data) {
    const std::uint8_t* begin = shared_memory(from);
    data.assign(begin, begin + bytes);
  };
}

// To another block's shared memory, as copy or reduction: [target], [source], size, [mbarrier]
Outcome send_bytes(Context& c, const Op& op, Mask mask) {
  const Lanes target = read(c, op, 0, mask), source = read(c, op, 1, mask);
  const Lanes sizes = read(c, op, 2, mask);
  each(mask, [&](int l) {
    const std::uint64_t bytes = cut(sizes[l], 4);
    check_size(c, op, l, bytes);
    const Place to = shared_range(c, op, l, op.space, address_of(op, 0, target, l), bytes, kChunk);
    const Place from =
        shared_range(c, op, l, Space::kShared, address_of(op, 1, source, l), bytes, kChunk);
    Transfer transfer;
    transfer.target = to.block;
    transfer.mbarrier = mbarrier_of(c, op, 3, mask, l, to);
    transfer.reported = bytes;
    const Completion done = completion_of({to.block, transfer.mbarrier.offset});
    note_async(c, op, l, {from.block, from.offset}, bytes, Use::kRead, done);
    note_async(c, op, l, {to.block, to.offset}, bytes, op.flag ? Use::kAtomic : Use::kWrite, done);
    read_from(transfer, from, bytes);
    const Reducer reduce = op.flag ? reducer_of(static_cast<Action>(op.number), op.type) : nullptr;
    const auto width = static_cast<std::uint64_t>(bytes_of(op.type));
    transfer.write = [=](Context&, const Bytes& data) {
      if (reduce == nullptr) std::memcpy(shared_memory(to), data.data(), data.size());
      for (std::uint64_t i = 0; reduce != nullptr && i < data.size(); i += width) {
        reduce(shared_memory(to) + i, data.data() + i);
      }
    };
    c.engine->start(c, op, l, std::move(transfer));
  });
  return Outcome::kNext;
}

// To global memory, as copy or reduction: [target], [source], size {, policy}
Outcome store_bytes(Context& c, const Op& op, Mask mask) {
  const Lanes target = read(c, op, 0, mask), source = read(c, op, 1, mask);
  const Lanes sizes = read(c, op, 2, mask);
  each(mask, [&](int l) {
    const std::uint64_t to = address_of(op, 0, target, l), bytes = cut(sizes[l], 4);
    check_size(c, op, l, bytes);
    check_global_address(c, op, l, to);
    const Place from =
        shared_range(c, op, l, Space::kShared, address_of(op, 1, source, l), bytes, kChunk);
    Transfer transfer;
    join_group(c, l, transfer);
    note_async(c, op, l, {from.block, from.offset}, bytes, Use::kRead, bulk_reads(c, l));
    note_stored(c, op, l, {&to, 1}, bytes, op.flag ? Use::kAtomic : Use::kWrite, bulk_writes(c, l));
    transfer.bytes = bytes;
    read_from(transfer, from, bytes);
    const Origin origin{&op, c.thread_of(l), c.warp->block->index};
    const Reducer reduce = op.flag ? reducer_of(static_cast<Action>(op.number), op.type) : nullptr;
    const auto width = static_cast<std::uint64_t>(bytes_of(op.type));
    transfer.write = [=](Context& later, const Bytes& data) {
      for (const std::uint64_t place : places_of(*later.memory, to)) {
        std::uint8_t* begin = global(later, origin, place, bytes);
        if (reduce == nullptr) std::memcpy(begin, data.data(), data.size());
        for (std::uint64_t i = 0; reduce != nullptr && i < data.size(); i += width) {
          reduce(begin + i, data.data() + i);
        }
      }
    };
    c.engine->start(c, op, l, std::move(transfer));
  });
  return Outcome::kNext;
}

// A hint: only its operands are checked.
Outcome prefetch(Context& c, const Op& op, Mask mask) {
  const Lanes source = read(c, op, 0, mask), sizes = read(c, op, 1, mask);
  each(mask, [&](int l) {
    check_size(c, op, l, cut(sizes[l], 4));
    check_global_address(c, op, l, address_of(op, 0, source, l));
  });
  return Outcome::kNext;
}

Outcome commit(Context& c, const Op&, Mask mask) {
  each(mask, [&](int l) { c.warp->bulk_groups[l] += 1; });
  return Outcome::kNext;
}

// Waits until all but the last N groups are done, or have read their sources (op.flag).
Outcome await_groups(Context& c, const Op& op, Mask mask) {
  const Lanes left = read(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::uint64_t groups = c.warp->bulk_groups[l], kept = cut(left[l], 4);
    if (groups > kept) {
      c.engine->complete(c, *c.warp, l, groups - kept, op.flag);
      await_bulk(c, l, groups - kept, op.flag);
    }
  });
  return Outcome::kNext;
}

// st.async [target], value or {values}, [mbarrier]; red.async with one value.
Outcome store_async(Context& c, const Op& op, Mask mask) {
  const int count = static_cast<int>(op.values.size()) - 2, width = bytes_of(op.type);
  const Lanes target = read(c, op, 0, mask);
  each(mask, [&](int l) {
    const auto bytes = static_cast<std::uint64_t>(count * width);
    const Place to = shared_range(c, op, l, op.space, address_of(op, 0, target, l), bytes, bytes);
    Transfer transfer;
    transfer.target = to.block;
    transfer.mbarrier = mbarrier_of(c, op, 1 + count, mask, l, to);
    transfer.reported = bytes;
    note_sent(c, op, l, {to.block, to.offset}, bytes, op.flag ? Use::kAtomic : Use::kWrite,
              completion_of({to.block, transfer.mbarrier.offset}));
    for (int i = 0; i < count; ++i) {
      const std::uint64_t value = read(c, op, 1 + i, mask)[l];
      for (int b = 0; b < width; ++b) {
        transfer.data.push_back(static_cast<std::uint8_t>(value >> 8 * b));
      }
    }
    const Reducer reduce = op.flag ? reducer_of(static_cast<Action>(op.number), op.type) : nullptr;
    transfer.write = [=](Context&, const Bytes& data) {
      if (reduce != nullptr) {
        reduce(shared_memory(to), data.data());
      } else {
        std::memcpy(shared_memory(to), data.data(), data.size());
      }
    };
    c.engine->start(c, op, l, std::move(transfer));
  });
  return Outcome::kNext;
}

constexpr const char* kReports = "mbarrier::complete_tx::bytes";

// Whether the modifiers from position 3 on are a direction: target, source.
bool goes(const Statement& s, std::size_t first, const char* target, const char* source) {
  return s.opcode.size() > first + 1 && s.opcode[first] == target && s.opcode[first + 1] == source;
}

bool decode_copy(const Statement& s, Op& op) {
  const std::size_t operands = s.operands.size() - (has(s, "L2::cache_hint") ? 1 : 0);
  if (goes(s, 3, "global", "shared::cta")) {
    op.handler = store_bytes;
    return operands == 3 && has(s, "bulk_group") &&
           has_no_other(s,
                        {"async", "bulk", "global", "shared::cta", "bulk_group", "L2::cache_hint"});
  }
  op.space = s.opcode[3] == "shared::cta" ? Space::kShared : Space::kCluster;
  if (!has(s, kReports)) return false;
  if (goes(s, 3, "shared::cluster", "shared::cta")) {
    op.handler = send_bytes;
    return operands == 4 &&
           has_no_other(s, {"async", "bulk", "shared::cluster", "shared::cta", kReports});
  }
  op.flag = has(s, "multicast::cluster");
  op.handler = load_bytes;
  const bool known =
      goes(s, 3, "shared::cluster", "global") || (goes(s, 3, "shared::cta", "global") && !op.flag);
  return known && operands == (op.flag ? 5u : 4u) &&
         has_no_other(s, {"async", "bulk", "shared::cluster", "shared::cta", "global", kReports,
                          "multicast::cluster", "L2::cache_hint"});
}

// Whether shared memory of a cluster has a reduction: those of 32 bits, and sums of 64.
bool is_of_cluster(Action action, Type type) {
  return type == Type::kB32 || type == Type::kU32 || type == Type::kS32 ||
         (type == Type::kU64 && action == kAdd);
}

bool decode_reduction(const Statement& s, Op& op) {
  op.number = action_of(s);
  op.flag = true;
  if (op.number < 0 || reducer_of(static_cast<Action>(op.number), op.type) == nullptr) return false;
  const std::string action = s.opcode[s.opcode.size() - (has(s, "noftz") ? 3 : 2)];
  const std::string type = s.opcode.back();
  const std::size_t operands = s.operands.size() - (has(s, "L2::cache_hint") ? 1 : 0);
  const bool is_half = op.type == Type::kF16 || op.type == Type::kBf16;
  if (goes(s, 4, "global", "shared::cta")) {
    op.handler = store_bytes;
    // Sums of 16-bit floats have to say .noftz, and those of 64 bits are .u64.
    return operands == 3 && (op.type != Type::kS64 || op.number != kAdd) && has(s, "bulk_group") &&
           has(s, "noftz") == (is_half && op.number == kAdd) &&
           has_no_other(s, {"reduce", "async", "bulk", "global", "shared::cta", "bulk_group",
                            "L2::cache_hint", "noftz", action.c_str(), type.c_str()});
  }
  op.space = Space::kCluster;
  op.handler = send_bytes;
  return goes(s, 4, "shared::cluster", "shared::cta") && operands == 4 && has(s, kReports) &&
         is_of_cluster(static_cast<Action>(op.number), op.type) &&
         has_no_other(s, {"reduce", "async", "bulk", "shared::cluster", "shared::cta", kReports,
                          action.c_str(), type.c_str()});
}

bool decode_groups(const Statement& s, Op& op) {
  if (s.opcode[3] == "commit_group") {
    op.handler = commit;
    return s.operands.empty() && s.opcode.size() == 4;
  }
  op.flag = has(s, "read");
  op.handler = await_groups;
  return s.operands.size() == 1 && has_no_other(s, {"async", "bulk", "wait_group", "read"});
}

bool decode_store_async(const Statement& s, Op& op) {
  op.written = 0;
  op.space = space_of(s);
  op.flag = s.opcode[0] == "red";
  op.handler = store_async;
  const bool in_shared = op.space == Space::kCluster || op.space == Space::kGeneric;
  if (s.operands.size() != 3 || !has(s, kReports) || !in_shared) return false;
  const std::string type = s.opcode.back();
  if (!op.flag) {
    return bytes_of(op.type) >= 4 && bytes_of(op.type) <= 8 &&
           has_no_other(s,
                        {"async", "weak", "shared::cluster", kReports, "v2", "v4", type.c_str()});
  }
  op.number = action_of(s);
  if (op.number < 0 || reducer_of(static_cast<Action>(op.number), op.type) == nullptr) return false;
  const std::string action = s.opcode[s.opcode.size() - 2];
  const bool signed_sum = op.type == Type::kS64 && op.number == kAdd;
  return (signed_sum || is_of_cluster(static_cast<Action>(op.number), op.type)) &&
         has_no_other(s, {"async", "relaxed", "cluster", "shared::cluster", kReports,
                          action.c_str(), type.c_str()});
}

}  // namespace

bool decode_bulk(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if ((name == "st" || name == "red") && has(s, "async")) return decode_store_async(s, op);
  if (name != "cp" || !has(s, "bulk") || has(s, "tensor") || s.opcode.size() < 4) return false;
  op.written = 0;
  if (s.opcode[1] == "reduce") return decode_reduction(s, op);
  if (s.opcode[3] == "commit_group" || s.opcode[3] == "wait_group") return decode_groups(s, op);
  if (s.opcode[3] == "prefetch") {
    op.handler = prefetch;
    return has_no_other(s, {"async", "bulk", "prefetch", "L2", "global", "L2::cache_hint"});
  }
  return decode_copy(s, op);
}

}  // namespace ptx_machine
