// Peers whose memory this rank cannot address: ranks of other nodes (docs/kernels/protocol.md, "Several
// nodes").
//
// A Move names a place in a rank's data by its distance from the beginning. This has the same
// meaning for transports that have the peer's address, for transports that have the local address
// of the same object (a symmetric heap), and for transports that need no address.
//
// Ordering. A receive that is done on a stream has brought all bytes, and they are visible to later
// work on the stream. A send that is done has read all of its bytes. For each pair of ranks, sends
// and receives come in the same order at both ends. An exchange may wait for the peers' part of it.
// Its sends wait for nothing else of this rank, so a rank may send to a peer that sends to it.
//
// Buffer reuse. The memory that a receive writes is free from `open` on. `open` comes after the
// last read of this memory by earlier calls. Two-sided transports receive after `open` on the same
// stream. One-sided transports tell the peers at `open`.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/runtime/nvshmem_abi.h"
#include "cuda_host/driver.h"

namespace flux::host {

// A peer has not done its part within the timeout, or its connection is gone.
class PeerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Move {
  enum Kind { kSend, kReceive } kind;
  int peer;
  std::int64_t at;     // bytes from the beginning of this rank's data
  std::int64_t there;  // sends: bytes from the beginning of the peer's data
  std::size_t bytes;
  int box;  // the receiver's word for it, each used once in a call
};

// A remote that puts the sums of ReduceScatter from the device while the GEMM runs. The kernels are
// those of cuda/runtime/nvshmem_abi.h. That header says what they await and which rank may
// overwrite what.
class Relay {
 public:
  virtual ~Relay() = default;
  // By rank, this rank's words for the calls that ranks of other nodes have opened.
  virtual const std::uint64_t* opened() const = 0;
  // This rank's word for arrivals in a box. The same address names a peer's word.
  virtual std::uint64_t* box(int index) const = 0;
  virtual void send(const FluxRelayArgs& args, Stream stream) const = 0;
  virtual void add_up(const FluxNodeSumArgs& args, Stream stream) const = 0;
};

class Remote {
 public:
  virtual ~Remote() = default;

  // Null: sums travel by exchange().
  virtual const Relay* relay() const { return nullptr; }

  // From here on in the stream, exchanges of call `epoch` may write to this rank's data.
  virtual void open(Stream stream, std::uint32_t epoch) = 0;
  // Throws PeerLost when the host finds out that a peer is gone.
  virtual void exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) = 0;
  // Called once in 2^30 calls, before `open`, to renew words: no word may be older than that.
  virtual void renew(Stream stream, std::uint32_t epoch) = 0;
  // This rank makes no more calls. Tells the peers as far as possible, then lets every exchange of
  // this rank end, done or not. Blocks until they have ended.
  virtual void give_up(Stream stream, std::uint32_t epoch) = 0;
  // Releases its resources; no exchange may be in progress. Idempotent.
  virtual void close() = 0;
};

// Number of words of a rank's mail (one-sided transports). First there is one word per rank: that
// rank has opened a call. Then come the boxes.
inline int mail_words(int world, int boxes) { return world + boxes; }

// Peers that can be addressed directly: virtual ranks on one GPU that simulate several nodes.
struct DirectPeers {
  int rank;
  std::vector<int> others;      // ranks of other nodes
  std::vector<Address> data;    // by rank
  std::vector<Address> mail;    // by rank, mail_words() of 32 bits
  std::vector<Address> status;  // by rank
  int boxes;
};

class DirectRemote : public Remote {
 public:
  DirectRemote(std::shared_ptr<Driver> driver, DirectPeers peers);
  void open(Stream stream, std::uint32_t epoch) override;
  void exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) override;
  void renew(Stream stream, std::uint32_t epoch) override;
  void give_up(Stream stream, std::uint32_t epoch) override;
  void close() override {}

 private:
  Address word(int rank, int index) const;

  std::shared_ptr<Driver> driver_;
  DirectPeers peers_;
};

// Operations that write to a peer's status that `rank` has given up in call `epoch`.
std::vector<MemOp> tell_of_giving_up(Address status, int rank, std::uint32_t epoch);

}  // namespace flux::host
