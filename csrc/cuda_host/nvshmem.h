// Peers reached by one-sided puts: NVSHMEM, on memory of its symmetric heap.
//
// Like DirectRemote, with three differences. A local address names the same place at a peer. Words
// have 64 bits; the epoch is the lower half, and streams wait for this half. Data and its word go
// in one put: a reader that sees the word sees the data.
#pragma once

#include "cuda_host/remote.h"

namespace flux::host {

// Functions of libflux_nvshmem.so (cuda/runtime/nvshmem_abi.h). They return 0 unless they fail. All
// put their work behind earlier work on the stream. PutSignal writes `bytes` to `to` at rank `pe`,
// then `value` to `word` there. RaiseSignal writes the word only. SendSums and AddUpNodes launch
// the kernels that send and add up sums of nodes.
using PutSignal = int (*)(void* to, const void* from, std::uint64_t bytes, std::uint64_t* word,
                          std::uint64_t value, int pe, void* stream);
using RaiseSignal = int (*)(std::uint64_t* word, std::uint64_t value, int pe, void* stream);
using SendSums = int (*)(const FluxRelayArgs* args, void* stream);
using AddUpNodes = int (*)(const FluxNodeSumArgs* args, void* stream);

struct NvshmemPeers {
  PutSignal put;
  RaiseSignal raise;
  SendSums relay;
  AddUpNodes node_sum;
  int rank;
  int world;
  std::vector<int> others;  // ranks of other nodes; NVSHMEM numbers them in the same way
  // Of this rank, in the symmetric heap.
  Address data;
  Address mail;  // mail_words() of 64 bits
  Address status;
  int boxes;
};

class NvshmemRemote : public Remote, public Relay {
 public:
  NvshmemRemote(std::shared_ptr<Driver> driver, NvshmemPeers peers);
  void open(Stream stream, std::uint32_t epoch) override;
  void exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) override;
  void renew(Stream stream, std::uint32_t epoch) override;
  void give_up(Stream stream, std::uint32_t epoch) override;
  void close() override {}

  const Relay* relay() const override { return this; }
  const std::uint64_t* opened() const override;
  std::uint64_t* box(int index) const override;
  void send(const FluxRelayArgs& args, Stream stream) const override;
  void add_up(const FluxNodeSumArgs& args, Stream stream) const override;

 private:
  Address word(int index) const { return peers_.mail + index * sizeof(std::uint64_t); }
  void raise(Address word, std::uint64_t value, int peer, Stream stream);
  void fill_mail(Stream stream, int first, std::uint32_t value);

  std::shared_ptr<Driver> driver_;
  NvshmemPeers peers_;
};

}  // namespace flux::host
