// The asynchronous engine: what threads start and what is performed later, in an order of the seed's.
//
// A transfer has two steps. Its source is read, then its result is written; a transfer that an mbarrier
// counts then reports its bytes there. Without a seed each step comes as late as it may: when a thread
// waits for it, when no thread of the kernel can go on, or after kMostRounds, since threads may spin on
// what other kernels write in the meantime. With a seed it comes at some time before that. Transfers are
// unordered among each other, as PTX says, those of one bulk group too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"

namespace ptx_machine {

using Bytes = std::vector<std::uint8_t>;

// The thread that started something, for messages.
struct Origin {
  const Op* op = nullptr;
  int thread = 0;
  Dim block;
};

[[noreturn]] void fail(const Context& c, const Origin& origin, const std::string& why);
// Host address of `bytes` bytes of global memory. Throws PtxError.
std::uint8_t* global(const Context& c, const Origin& origin, std::uint64_t address,
                     std::uint64_t bytes);

struct Transfer {
  Origin origin;
  std::function<void(Context&, Bytes&)> read;  // fills `data`; may be empty
  std::function<void(Context&, const Bytes&)> write;
  Bytes data;
  Block* source = nullptr;     // whose shared memory is read
  Block* target = nullptr;     // whose shared memory is written
  Place mbarrier;              // without a block: none
  std::uint64_t reported = 0;  // bytes that it counts
  std::uint64_t bytes = 0;     // that it copies, if no mbarrier counts them
  // Of a transfer that belongs to a bulk group: the thread and how many groups it had committed.
  const Warp* owner = nullptr;
  int lane = 0;
  std::uint64_t group = 0;
  // Kept by the engine.
  bool is_read = false;
  std::uint64_t read_due = 0, write_due = 0;  // rounds
};

class Engine {
 public:
  // Rounds after which a step is performed in any case. In each, every warp has had a turn.
  static constexpr std::uint64_t kMostRounds = 24;

  explicit Engine(std::mt19937_64* random) : random_(random) {}

  void start(Context& c, const Op& op, int lane, Transfer transfer);

  // Performs what is due. Returns whether anything was.
  bool tick(Context& c);
  // Performs one step, because no thread can go on. Returns false if there is none.
  bool advance(Context& c);
  // Performs the bulk groups of a thread before number `before`: only their reads, or the whole of them.
  void complete(Context& c, const Warp& owner, int lane, std::uint64_t before, bool only_reads);
  // Fails if a transfer needs the shared memory of a block that has ended.
  void block_ended(Context& c, const Block& block) const;
  // Performs what is left when all threads have ended: writes to global memory.
  void finish(Context& c);
  bool empty() const { return transfers_.empty(); }

 private:
  void read(Context& c, Transfer& transfer);
  void write(Context& c, std::size_t number);
  std::size_t any() const;

  std::mt19937_64* random_;  // null without a seed
  std::uint64_t round_ = 0;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // oldest first
};

}  // namespace ptx_machine
