// Peers reached by NCCL, point to point: GPUs of other hosts, or of one host without P2P.
//
// The library is looked up at run time, as the driver is (driver.h): no headers, and none at all on
// machines without GPUs.
//
// The communicator is not blocking, as far as its host functions go: the first exchange of two ranks
// connects them, and a host that waits in there for a peer that never comes could not give up. Each
// call is followed by a look at its state until it is through, or the timeout is over.
#pragma once

#include <string>

#include "cuda_host/remote.h"

namespace flux::host {

struct NcclSetup {
  std::string library;
  std::string id;  // nccl_unique_id() of one of the ranks
  int rank;
  int world;
  Address data;  // of this rank; its first 2 * world bytes are zero
  int blocks;    // that NCCL's kernels may have: the GEMM leaves room for as many
  std::uint64_t timeout_ns;
};

// Identifies a new communicator. Throws std::runtime_error: no such library, or it refuses.
std::string nccl_unique_id(const std::string& library);

class NcclRemote : public Remote {
 public:
  // Collective. Connects this rank with all others and loads what NCCL needs, by sending bytes of
  // zero: later, a GEMM that waits may hold up both. Throws PeerLost after the timeout.
  NcclRemote(std::shared_ptr<Driver> driver, NcclSetup setup);
  ~NcclRemote() override;

  void open(Stream, std::uint32_t) override {}
  void exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) override;
  void renew(Stream, std::uint32_t) override {}
  void give_up(Stream stream, std::uint32_t epoch) override;
  void close() override;

 private:
  struct Entries;
  void check(int result, const char* what);
  void settle(const char* what, std::uint64_t limit_ns);
  void connect();
  void abort();

  std::shared_ptr<Driver> driver_;
  NcclSetup setup_;
  std::shared_ptr<Entries> entries_;
  void* communicator_ = nullptr;
};

}  // namespace flux::host
