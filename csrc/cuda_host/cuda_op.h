// One rank's calls of a fused op on a GPU: everything that a call puts on streams, in one native call.
//
//   AGGemm   stream       zeros, NaN | entry -> all peers | own rows | kernel: wait, multiply | ... | join
//            copy stream  rows to or from peers, their signals ...
//
//   two buffers           kernel: own rows of x, wait, multiply | ... | join     (cuda_op_buffers.cpp)
//            copy stream  rows to peers, their signals ... | entry -> all peers
//
//   path medium           ... own rows | kernel: own rows | await rows | kernel: a peer's rows | ... | join
//
//   GemmRS   stream       zeros, NaN | entry -> all peers | kernel: tile -> its owner, flag | reduction
//   copied                ... | kernel: tile -> own memory | ... | reduction           (cuda_op_copies.cpp)
//            copy stream  an owner's rows -> it, flag | ...
//   GemmAR                ... | "my rows are everywhere" -> all peers | await all | result -> output
//
// The host submits in this order: own rows, first kernel, copies, further kernels. The copies are
// submitted after the first kernel, which waits for the copies of peers, and before all later work
// on its stream. So they start while this kernel runs, even if all streams share one hardware
// queue.
//
// All-to-alls are in cuda_op_exchange.cpp.
//
// Between nodes there is a third stream: see cuda_op_nodes.cpp, and docs/kernels/protocol.md for the
// pictures.
//
// The host waits for nothing, allocates no device memory and resets no words: signals, flags and
// entries hold the number of the call (epoch). The rules for which rank may write to which buffer
// at which time are in gather_tiles.h (gathered rows) and cuda/gemm/sm90/scatter_store.cuh
// (partials). A stream operation raises an entry after all earlier work of the stream. So an entry
// means that the rank's buffers are no longer read.
//
// A call on a stream that is being captured into a CUDA graph becomes part of the graph and uses
// separate words (cuda_op_captured.cpp): a graph's constants cannot depend on the number of its
// replays.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "cuda_host/calls.h"
#include "cuda_host/driver.h"
#include "cuda_host/gather_tiles.h"
#include "cuda_host/kernels.h"
#include "cuda_host/remote.h"
#include "cuda_host/route.h"
#include "cuda_host/stream_trace.h"
#include "schedule/exchange.h"
#include "schedule/schedule.h"

namespace flux::host {

// Symmetric memory of one op, as this rank addresses it, and the arguments common to all launches.
//
// The pad has, in this order:
//   W entries (word o: of the rank that holds rows of o for this node, cuda_op_nodes.cpp);
//   W words "my result is everywhere" (GemmAR);
//   the status (FLUX_STATUS_WORDS of 64 bits): peers write to it only to report that they gave up;
//   signals or flags, then offers (pulls) or (partials that are copied) flags of the own tiles;
//   the words of captured calls: their count, W entries, W of the result, signals or flags, offers;
//   those of path in_kernel: W words "my rows are here", then FLUX_GATHER_WORDS counts, then (GemmAR) flags
//   and a word for each sum (core/all_reduce.h);
//   where gathered rows have two buffers, signals of the second one.
// The data has, in this order:
//   AllGather: gathered rows, then their scales if they have some;
//   ReduceScatter: slots of partials, one per source, or (reduced in flight) one that all add to,
//   each behind its guard (core/scatter.h); then (GemmAR) the result;
//   where the device itself puts sums (Relay): the sum for a rank of each other node;
//   two buffers of rows that kernels push (path in_kernel, cuda_op_in_kernel.cpp);
//   the second buffer of gathered rows and their scales, if there are two;
//   slots of partials that copies take to their owners, one for each.
// GemmAllToAll: blocks from all ranks, one behind the other, then the product, behind its guard.
// AllToAllGemm: gathered rows, then blocks for all ranks. Both: blocks for, or from, ranks of other nodes.
// If the NVLink switch adds up, there is a slot per owner. It holds this rank's partials of the
// owner's rows, and the owner reads it. (The owner of a slot is the same at any M, so that only the
// owner of a tile has to be awaited before the tile is written.) Between nodes there are W slots:
// for each node's rows, the partials of this node's ranks. Behind the slots is an inbox for the sum
// of each other node.
struct CudaOpSetup {
  int rank;
  int world;
  std::vector<Address> pads;  // by rank; 0 where they cannot be addressed
  std::vector<Address> data;  // by rank
  Address multicast;          // all ranks' data at one address (NVLink SHARP), or 0
  static constexpr std::int64_t kSwitchBytes = 16;  // size of an access to it
  bool sums_by_switch;
  std::int64_t row_bytes;  // of rows that are moved
  int slots;
  std::int64_t slot_bytes;   // of a guard and the slot behind it
  std::int64_t guard_bytes;  // 0: kernels need none
  std::int64_t rest_offset;  // of what comes after gathered rows or slots
  std::int64_t sums_offset;  // of sums that the device puts; the end of the data if it puts none
  bool scales_travel;        // AllGather, one scale per row of x
  bool all_reduce;
  float scale;     // of sums
  int signals;     // words of the pad after the status
  int offers;      // words of the pad after these
  Address report;  // where the host reads the status, in its own memory; kernels write to it
  std::uint64_t timeout_ns;
  int sm_count;
  int device;
  bool poison;    // fill memory with NaN if it must not be read before it is written
  int nodes = 1;  // groups of consecutive ranks that share memory, of equal size
  std::shared_ptr<Remote> remote = nullptr;  // peers of other nodes; null: one node
  int beside = 0;                            // blocks that may run beside a GEMM
  int strips = 0;                            // words for the sum of one node, where a Relay puts it
  int boxes = 0;                             // of the remote, for arrivals from other nodes
  int dtype = 0;                             // of sums, as FluxRelayArgs has it
  // Whether ranks share the device. If so, waiting blocks must leave room for those they wait for.
  bool shared = false;
  // Whether copies of captured calls may run beside the kernel that waits for peers' copies. A
  // graph's scheduler knows only the graph's edges. It may also put the copies after the kernel,
  // and then all ranks would hang.
  bool graph_overlap = false;
  int lane = 0;    // this rank's number among the ranks of its process on this device
  int margin = 0;  // multiprocessors that are left to kernels of other streams
  // Whether blocks of the GEMM on the margin leave rather than wait (cuda/gemm/tile_counter.cuh).
  bool lends_margin = false;
  std::int64_t pushed_bytes = 0;   // of one of the two buffers of rows that kernels push
  int sum_flags = 0;               // of GemmAR on path in_kernel
  int sum_words = 0;               // these, and the words of sums
  std::int64_t second_offset = 0;  // of the second buffer of gathered rows; 0: there is one
  std::int64_t copied_offset = 0;  // of partials that copies take to their owners; 0: none
  bool scaled_rows = false;        // x has a scale for each row
  int x_bytes = 2;                 // of an element of x
  std::int64_t staged_offset =
      0;  // of blocks for, or from, ranks of other nodes; 0: there are none
};

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// One weight with its bias and scale, and the destination of the product.
struct Operand {
  Address weight;
  std::int64_t ld;
  int n;
  Address out;  // AllGather only
  std::int64_t out_ld;
  Address bias;
  Address scale;
};

// Rows that are multiplied: own rows of x without gaps (AllGather), or [M, K/W].
struct Rows {
  Address x;
  std::int64_t ld;
  int k;
  Address scale;
};

// Words of the pads that the ranks of a call use, by rank.
struct CallWords {
  std::vector<Address> entries;
  std::vector<Address> done;
  std::vector<Address> signals;
  std::vector<Address> offers;
};

class CudaOp {
 public:
  // Words of a pad: see CudaOpSetup.
  static std::int64_t pad_words(int world, int signals, int offers, int sum_words,
                                bool two_buffers);

  // One kernel per operand.
  CudaOp(std::shared_ptr<Driver> driver, std::vector<std::shared_ptr<Kernel>> kernels,
         CudaOpSetup setup);
  ~CudaOp();
  CudaOp(const CudaOp&) = delete;

  // Destroys the streams and events. No work may be pending on them. Idempotent.
  void close();

  // Tells the peers that this rank makes no more calls and may not have done its part of the last
  // ones. Without this, a wait that was given up could become a wrong result on another rank. Then
  // raises every word that a stream of this rank may wait for. Blocks until that is done.
  void let_go();

  // Number of the last call. It may be set between calls, to the same value on all ranks.
  std::uint32_t epoch() const { return epoch_; }
  void set_epoch(std::uint32_t epoch);
  // Whether a wait of a finished call has failed, or a peer has given up. This is FLUX_STATUS_CODE
  // as the last finished call or look() has read it.
  bool failed() const;
  // Reads the status now. Blocks until that is done.
  void look();
  // See Calls.
  std::optional<Calls::Call> waiting() { return calls_->waiting(); }
  Stream copy_stream() const { return copy_stream_; }
  Stream network_stream() const { return network_stream_; }  // 0: there is one node

  // From the next call on, records the work of kernels (of a trace build) in the FluxTrace at
  // `kernels`, and the work of streams in `streams`. 0 and null end the trace. During a trace,
  // calls that are captured are refused.
  void trace(Address kernels, std::shared_ptr<StreamTrace> streams);
  bool traced() const { return streams_ != nullptr; }

  // Device memory that a call with this schedule needs on each stream that it runs on, in bytes.
  std::uint64_t workspace_bytes(const Schedule& schedule, const std::vector<Operand>& operands,
                                int k) const;
  // Zeroed memory of that size for a stream. It still belongs to the caller.
  void set_workspace(Stream stream, Address address, std::uint64_t bytes);

  // Makes the first copy, fill and memory operations between this rank and each peer, on the copy
  // stream. The first of a kind may load code or map memory, and must not come behind a kernel that
  // waits.
  void touch_peers();

  // Throws std::invalid_argument when the pads, the data or the boxes are too small for a schedule.
  // Calls throw the same before anything is on a stream. It is alike on all ranks.
  void require_room(const Schedule& schedule) const;

  // The maps of the next call of an op of experts, whose kernels are grouped. Its operands have the
  // address of a result or of products as `out`, and no bias. `route` makes the maps in the call, or what
  // is left of them.
  void set_groups(const FluxGroups& groups, std::shared_ptr<const Route> route) {
    groups_ = groups;
    route_ = std::move(route);
  }

  // All-to-all: the columns of each rank, by packed tensor. Once, before the first call.
  void set_columns(std::vector<std::vector<Range>> columns);
  // GemmAllToAll: [own rows, K] x [K, N]. Later work on the stream finds the blocks of all ranks.
  void project(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand);
  // AllToAllGemm. Between the two, the own heads of all rows are put on the stream, and the own columns of
  // the own rows. Later work on it finds the gathered rows.
  void begin_heads(const Schedule& schedule, Stream stream);
  void gather_heads(const Schedule& schedule, Stream stream, const Operand& operand);

  // [own rows, K] x [K, N/W] each. `gathered`: where [M, K] is also copied to, or 0. `sources`: by
  // rank, the rows to pull from if these are not the gathered rows.
  void ag_gemm(const Schedule& schedule, Stream stream, const Rows& x,
               const std::vector<Operand>& operands, Address gathered,
               const std::vector<Address>& sources);

  // scatter() writes [M, K/W] x [K/W, N] into the owners' slots; reduce() then sums this rank's own
  // rows. `out`: [own rows, N], or (GemmAR) [M, N].
  // `out`: where the kernel itself puts the sums, if the schedule says that it sums.
  void scatter(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand,
               Address out = 0);
  void reduce(const Schedule& schedule, Stream stream, const Operand& operand, Address out);
  // scatter(), then reduce().
  void gemm_rs(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand,
               Address out);

 private:
  static void require(const char* what, std::int64_t needed, std::int64_t there);
  void begin(const Schedule& schedule, Stream stream);
  void begin_captured(const Schedule& schedule, Stream stream);
  void follow_capture(Stream stream);
  FluxMeetArgs meeting(const std::vector<Address>& words) const;
  FluxMeetArgs rows_wait() const;
  // Whether streams of an eager call wait for peers. Elsewhere kernels alone do.
  bool streams_wait(const Schedule& schedule) const;
  // Whether peers read this rank's buffers. If so, these are free when all have entered the next
  // call.
  bool read_by_peers(const Schedule& schedule) const;
  void zero_sums(Stream stream);
  void by_switch(FluxReduceArgs& args) const;
  // Number of ranks whose memory this rank addresses, itself included.
  int lanes() const { return setup_.world / setup_.nodes; }
  int node() const { return setup_.rank / lanes(); }
  Range neighbours() const { return {node() * lanes(), (node() + 1) * lanes()}; }
  // The rank of this node that holds the partials of this node's ranks for the rows of `owner`.
  int holder(int owner) const { return neighbours().begin + owner % lanes(); }
  int twin(int node) const { return node * lanes() + setup_.rank % lanes(); }
  int region_of(int owner) const { return owner / lanes() * (setup_.signals / setup_.nodes); }
  // `kernel_reports`: the kernel that ends the call reports failures itself.
  void end(Stream stream, bool kernel_reports);
  void await_rows(const Schedule& schedule, Stream stream, bool own) const;
  void await_chunk(const Schedule& schedule, Stream stream, int owner) const;
  void collect(int m, Stream stream, Address out);
  int words_in_use(const Schedule& schedule) const;
  // The value that signals and flags of the call hold.
  std::uint32_t number() const { return capture_ != 0 ? 1 : epoch_; }
  FluxReduceArgs reduce_args(const Schedule& schedule, int n) const;
  void put_reduction(const Schedule& schedule, Stream stream, const Operand& operand, Address out,
                     bool early);
  // Launches of a weight: one, or one per chunk where the GEMM is split.
  int launches(const Schedule& schedule) const { return schedule.spec.split ? setup_.world : 1; }
  void put_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                  const std::vector<Operand>& operands, std::size_t number, int launch,
                  bool own_in_place);
  void put_route(Stream stream) const;
  void lend_margin(FluxGemmArgs* args) const;
  static void only_rows(int rows, FluxGemmArgs* args);
  static void only_chunk(const Schedule& schedule, int chunk, FluxGemmArgs* args);
  // `launch`: number of a weight, or the owner of the summed rows; for traces.
  FluxSync sync(int launch) const;
  Address status_of(int rank) const;
  FluxGemmArgs gemm_args(const Schedule& schedule, Stream stream, const Operand& operand, int k,
                         int launch = 0) const;
  std::vector<MemOp> raise_in_node(const std::vector<Address>& words,
                                   const std::vector<int>& places) const;
  std::vector<MemOp> await_node(const std::vector<Address>& words) const;
  std::vector<int> entries() const;
  void join(Stream later, Stream earlier);
  void exchange(const std::vector<Move>& moves);
  void refuse_traced_captures() const;
  void put_traced(Stream stream, Work work, const std::vector<MemOp>& ops);

  // cuda_op_buffers.cpp
  int buffer_of(std::uint32_t epoch) const { return setup_.second_offset != 0 ? epoch % 2 : 0; }
  int buffer() const { return capture_ != 0 ? 0 : buffer_of(epoch_); }
  bool renews_words() const;
  bool has_credit() const;
  void renew_signals(Stream stream);
  void fill_with_nan(Stream stream);
  void enter(Stream stream);
  bool own_in_place(const Schedule& schedule, const Rows& x, const std::vector<Operand>& operands,
                    bool collects) const;

  // cuda_op_copies.cpp
  void scatter_by_copies(const Schedule& schedule, Stream stream, const Rows& x,
                         const Operand& operand);
  FluxGemmArgs partials_args(const Schedule& schedule, Stream stream, const Rows& x,
                             const Operand& operand, int owner) const;
  void put_partials(const Schedule& schedule, Stream stream, const Rows& x, const Operand& operand);
  void await_partials(const Schedule& schedule, int n, int owner, int place, Range rows);
  FluxMeetArgs own_flags(int first, int count) const;
  void await_own_flags(const FluxMeetArgs& args, Stream stream);
  void await_entry(int owner);
  void send_partials(const Schedule& schedule, int owner, Range rows);
  Address partials_for(int owner) const;

  // cuda_op_exchange.cpp
  void require_exchange_room(const Schedule& schedule) const;
  int block_columns() const;
  int product_columns() const;
  void copy_block(Stream stream, int rank, Address block, Address wide, int rows, bool gathers);
  Address block_offset(const Schedule& schedule, int rank) const;
  FluxGemmArgs own_gemm(const Schedule& schedule, Stream stream, const Operand& operand,
                        int k) const;
  std::vector<std::int32_t> visited_columns() const;
  void await_columns(const Schedule& schedule, int peer, Stream stream);
  void send_block(const Schedule& schedule, int peer, Address product);
  Record block_record(const Schedule& schedule, int peer, int at, Range rows, int signal) const;
  void multiply_heads(const Schedule& schedule, Stream stream, const Operand& operand);
  void fetch_heads(const Schedule& schedule);
  void fetch_from(const Schedule& schedule, int peer, Range rows, int signal);

  // cuda_op_exchange_nodes.cpp
  std::int64_t blocks_end() const {
    return setup_.remote ? setup_.staged_offset : setup_.sums_offset;
  }
  void require_staged(const Schedule& schedule, int tiles) const;
  bool is_near(int rank) const { return rank / lanes() == node(); }
  Address staged_block(const Schedule& schedule, int rank, int peer) const;
  std::size_t block_bytes(int rows) const;
  int far_rank(int step, int sign) const;
  void exchange_blocks(const Schedule& schedule, Address product);
  void fetch_from_nodes(const Schedule& schedule, int tile);

  // cuda_op_in_kernel.cpp
  void gather_in_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                        const std::vector<Operand>& operands, Address gathered);
  FluxGather pushed_rows(const Schedule& schedule, Address x) const;
  Address pushed_words(int rank) const;
  void reduce_in_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                        const Operand& operand, Address out);
  FluxAllReduce all_reduce(Address out) const;
  void put_by_switch(FluxAllReduce* to) const;
  FluxAllReduce own_sums(Address out) const;
  Address sum_flags(int rank) const;
  Address result(int rank) const { return setup_.data[rank] + setup_.rest_offset; }
  void begin_in_kernel(Stream stream);
  int launch_in_kernel(int weight) const;
  Address pushed_data(int rank) const { return setup_.data[rank] + setup_.sums_offset; }

  // cuda_op_nodes.cpp
  void gather_rows(const Schedule& schedule);
  void send_sums(const Schedule& schedule, int n);
  void send_sum(const Schedule& schedule, int tile, int ahead, int n);
  void sum_of_node(const Schedule& schedule, int owner, Range rows, int n);
  void reduce_nodes(FluxReduceArgs* args) const;
  const Relay* relay() const { return setup_.remote ? setup_.remote->relay() : nullptr; }
  void relay_sums(const Schedule& schedule, int n);
  void add_up_nodes(const FluxReduceArgs& sum, Stream stream) const;
  int result_box(const CommTiling& c, int sender, int tile) const;
  void share_result(const Schedule& schedule, Stream stream);
  void share_tile(const Schedule& schedule, int tile, int ahead);
  std::int64_t slot(int number) const { return number * setup_.slot_bytes + setup_.guard_bytes; }
  std::int64_t partial_of(int owner, int lane) const;
  std::int64_t inbox_of(int node, int at) const;
  std::int64_t sum_for(int node) const;

  std::shared_ptr<Driver> driver_;
  std::vector<std::shared_ptr<Kernel>> kernels_;
  CudaOpSetup setup_;
  FluxGroups groups_{};
  std::shared_ptr<const Route> route_;
  std::vector<std::vector<Range>> columns_;  // all-to-all: of each rank, by packed tensor
  std::vector<std::int32_t> visits_;         // their ranges, as the kernel visits them
  CallWords eager_[2];                       // by buffer of gathered rows: signals differ
  CallWords captured_;
  const CallWords* words_ = &eager_[0];  // of the current call
  Address count_ = 0;                    // of this rank's captured calls
  std::vector<Address> gathered_[2];     // by buffer, then by rank
  std::vector<Address> scales_[2];
  std::map<Stream, std::pair<Address, std::uint64_t>> workspaces_;
  Stream copy_stream_ = 0;
  Stream network_stream_ = 0;
  std::shared_ptr<const Stream> rescue_;  // no wait is put on it
  Event forked_ = 0;
  Event joined_ = 0;
  std::vector<Event> parts_;      // behind the GEMM of each owner's rows
  std::shared_ptr<Calls> calls_;  // of the rank
  Event captured_end_ = 0;        // of the op's last call, within a capture
  Stream captured_stream_ = 0;
  std::uint64_t last_capture_ = 0;
  Address kernel_trace_ = 0;  // FluxTrace
  std::shared_ptr<StreamTrace> streams_;
  int whole_call_ = StreamTrace::kNone;
  std::uint64_t capture_ = 0;  // the capture of the current call; 0: none
  std::uint32_t epoch_ = 0;
  bool follows_ = false;    // the last eager call had the number epoch_
  bool by_credit_ = false;  // the current call: rows go to peers that have entered the call before
};

}  // namespace flux::host
