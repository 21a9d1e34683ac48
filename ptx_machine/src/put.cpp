// Puts of kernels, by a NIC: it copies at any time after the call, and takes no part in the order of
// memory. Checked here, when a put is started:
//  * source, destination and word are symmetric memory, and known to the machine where it can tell
//  * the source was written, and its writes are ordered before the put
//  * each thread that wrote to the source has executed a fence of scope .sys since. The fence of another
//    thread, ordered behind, would do for a thread that reads, but not for a NIC
//  * nothing that is not ordered before the put still reads or writes the destination
// From then on the source is read, and the destination written, until the end of the launch. The emulated
// NVSHMEM tells when it has written: then a reader needs an acquire of the word.
#include "put.h"

#include <atomic>

#include "call.h"
#include "races.h"

namespace ptx_machine {
namespace {

std::atomic<const PtxMachineNic*> attached{nullptr};

struct Put {
  std::uint64_t to, from, bytes, word, value;
  int rank;
};

// Where a range of this rank's symmetric memory lies at the put's rank.
std::uint64_t at_rank(Context& c, const Op& op, int lane, const PtxMachineNic& nic, const Put& put,
                      std::uint64_t address, std::uint64_t bytes, const char* what) {
  const auto find = [&](std::uint64_t place) {
    return reinterpret_cast<std::uint64_t>(
        nic.at_rank(reinterpret_cast<const void*>(place), put.rank));
  };
  const std::uint64_t begin = find(address), last = find(address + bytes - 1);
  if (begin == 0 || last != begin + bytes - 1) {
    c.fail(op, lane,
           std::string("the ") + what + " of a put to rank " + std::to_string(put.rank) + ", " +
               std::to_string(bytes) + " bytes, is not in the symmetric memory of that rank");
  }
  const std::string problem = outside_global(*c.memory, address, bytes);
  if (!problem.empty()) c.fail(op, lane, std::string("the ") + what + " of a put: " + problem);
  return begin;
}

void start(Context& c, const Op& op, int lane, const Put& put) {
  const PtxMachineNic* nic = attached;
  if (nic == nullptr) c.fail(op, lane, "a kernel puts, and this process has no emulated NVSHMEM");
  if (put.bytes == 0) c.fail(op, lane, "a put of no bytes");
  if (put.word % 8 != 0) c.fail(op, lane, "the word of a put is not aligned to 8 bytes");
  at_rank(c, op, lane, *nic, put, put.from, put.bytes, "source");
  const std::uint64_t to = at_rank(c, op, lane, *nic, put, put.to, put.bytes, "destination");
  const std::uint64_t word = at_rank(c, op, lane, *nic, put, put.word, 8, "word");
  // The memory of another process is not this machine's.
  const bool is_known = outside_global(*c.memory, to, put.bytes).empty();
  note_put(c, op, lane, put.from, is_known ? to : 0, put.bytes);
  nic->put(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(put.from), put.bytes,
           reinterpret_cast<std::uint64_t*>(word), put.value);
}

}  // namespace

void attach_nic(const PtxMachineNic* nic) { attached = nic; }

Outcome put_signal(Context& c, const Op& op, Mask mask) {
  each(mask, [&](int lane) {
    const auto number = [&](int place) {
      return argument_of_call<std::uint64_t>(c, op, lane, place);
    };
    const int rank = argument_of_call<std::int32_t>(c, op, lane, 6);
    start(c, op, lane, {number(1), number(2), number(3), number(4), number(5), rank});
  });
  return Outcome::kNext;
}

}  // namespace ptx_machine
