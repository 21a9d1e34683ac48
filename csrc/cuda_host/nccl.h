// Peers reached by NCCL, point to point: GPUs of other hosts, or of one host without P2P.
//
// The library is looked up at run time, like the driver (driver.h). No NCCL headers are needed, and
// no library on machines without GPUs.
//
// The host functions of the communicator do not block. The first exchange of two ranks connects
// them. A blocking call would wait there for a peer that never comes, and the host could not give
// up. So after each call its state is polled until the call is complete or the timeout has passed.
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
  int blocks;    // limit for NCCL's kernels: the GEMM leaves room for this number
  std::uint64_t timeout_ns;
};

// The id of a new communicator. Throws std::runtime_error if the library is missing or fails.
std::string nccl_unique_id(const std::string& library);

class NcclRemote : public Remote {
 public:
  // Collective. Sends bytes of zero, which connects this rank with all others and makes NCCL load
  // what it needs. Later, a GEMM that waits could delay both. Throws PeerLost after the timeout.
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
