#include "cuda_host/cuda_op.h"

#include <algorithm>
#include <stdexcept>

#include "core/relay.h"
#include "cuda_host/nvtx.h"

namespace flux::host {

namespace {

constexpr Address kStatusBytes = FLUX_STATUS_WORDS * sizeof(std::uint64_t);
constexpr std::int64_t kScaleBytes = sizeof(float);
constexpr std::int64_t kOutputBytes = 2;  // of an element: all kernels have 16-bit results

// In captured calls all ranks have met before the first copy.
const std::vector<Address> kAllMet;

}  // namespace

CudaOp::CudaOp(std::shared_ptr<Driver> driver, std::vector<std::shared_ptr<Kernel>> kernels,
               CudaOpSetup setup)
    : driver_(std::move(driver)), kernels_(std::move(kernels)), setup_(std::move(setup)) {
  const auto world = static_cast<std::size_t>(setup_.world);
  if (setup_.world < 1 || setup_.world > FLUX_MAX_WORLD || setup_.pads.size() != world ||
      setup_.data.size() != world || setup_.rank < 0 || setup_.rank >= setup_.world) {
    throw std::invalid_argument("a CudaOp needs the memory of 1 to " +
                                std::to_string(FLUX_MAX_WORLD) + " ranks");
  }
  const Address ranks = setup_.world * kWord, signals = setup_.signals * kWord;
  if (setup_.nodes < 1 || setup_.world % setup_.nodes != 0 ||
      (setup_.nodes > 1) != (setup_.remote != nullptr)) {
    throw std::invalid_argument("a CudaOp of several nodes of one size needs a Remote, got " +
                                std::to_string(setup_.nodes) + " nodes of " +
                                std::to_string(setup_.world) + " ranks");
  }
  for (int rank = 0; rank < setup_.world; ++rank) {
    CallWords& eager = eager_[0];
    eager.entries.push_back(setup_.pads[rank]);
    eager.done.push_back(eager.entries.back() + ranks);
    eager.signals.push_back(status_of(rank) + kStatusBytes);
    eager.offers.push_back(eager.signals.back() + signals);
    const Address count = eager.offers.back() + setup_.offers * kWord;
    if (rank == setup_.rank) count_ = count;
    captured_.entries.push_back(count + kWord);
    captured_.done.push_back(captured_.entries.back() + ranks);
    captured_.signals.push_back(captured_.done.back() + ranks);
    captured_.offers.push_back(captured_.signals.back() + signals);
    for (const std::int64_t offset : {std::int64_t{0}, setup_.second_offset}) {
      const int buffer = offset != 0 ? 1 : 0;
      gathered_[buffer].push_back(setup_.data[rank] + offset);
      scales_[buffer].push_back(setup_.data[rank] + offset + setup_.rest_offset);
      if (offset == 0 && setup_.second_offset == 0) break;
    }
  }
  eager_[1] = eager_[0];
  for (int rank = 0; rank < setup_.world && setup_.second_offset != 0; ++rank) {
    eager_[1].signals[rank] = sum_flags(rank) + setup_.sum_words * kWord;
  }
  rescue_ = driver_->rescue_stream();
  copy_stream_ = driver_->create_stream();
  if (setup_.remote) network_stream_ = driver_->create_stream();
  forked_ = driver_->create_event();
  joined_ = driver_->create_event();
  calls_ = Calls::of(driver_, setup_.lane);
  for (int i = 0; i < setup_.world && setup_.copied_offset != 0; ++i) {
    parts_.push_back(driver_->create_event());
  }
  captured_end_ = driver_->create_event();
}

std::int64_t CudaOp::pad_words(int world, int signals, int offers, int sum_words,
                               bool two_buffers) {
  const std::int64_t raised = std::int64_t{2} * world + signals + offers;
  return raised + kStatusBytes / kWord + 1 + raised + world + FLUX_GATHER_WORDS + sum_words +
         (two_buffers ? signals : 0);
}

CudaOp::~CudaOp() { close(); }

void CudaOp::close() {
  if (copy_stream_ == 0) return;
  driver_->destroy_event(forked_);
  driver_->destroy_event(joined_);
  for (const Event event : parts_) driver_->destroy_event(event);
  driver_->destroy_event(captured_end_);
  driver_->destroy_stream(copy_stream_);
  if (network_stream_ != 0) driver_->destroy_stream(network_stream_);
  copy_stream_ = network_stream_ = 0;
  rescue_.reset();
  calls_.reset();
  if (setup_.remote) setup_.remote->close();
}

// The words are 0 until this rank's first call, and only this rank raises them.
void CudaOp::touch_peers() {
  const Address done = eager_[0].done[setup_.rank] + setup_.rank * kWord;
  std::vector<MemOp> ops;
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    const Address entry = eager_[0].entries[peer] + setup_.rank * kWord;
    driver_->copy(copy_stream_, entry, done, kWord);
    driver_->fill(copy_stream_, entry, 0, 1);
    ops.push_back({MemOp::kWrite, entry, 0});
  }
  ops.push_back({MemOp::kWait, done, 0});
  driver_->memory_ops(copy_stream_, ops);
  if (columns_.empty()) return;
  for (int peer = neighbours().begin; peer < neighbours().end;
       ++peer) {  // into memory not used yet
    const std::size_t step = 2 * kWord;
    driver_->copy_rows(copy_stream_, setup_.data[setup_.rank], step, setup_.data[peer], step, kWord,
                       peer == setup_.rank ? 0 : 2);
  }
}

bool CudaOp::failed() const {
  // Volatile, because the device writes it.
  return *pointer<const volatile std::uint64_t>(setup_.report) != FLUX_WAIT_NONE;
}

void CudaOp::require(const char* what, std::int64_t needed, std::int64_t there) {
  if (needed <= there) return;
  throw std::invalid_argument("the schedule needs " + std::to_string(needed) + " " + what +
                              ", the op's memory has " + std::to_string(there));
}

void CudaOp::require_room(const Schedule& schedule) const {
  const Problem& p = schedule.spec.problem;
  const CommTiling& c = schedule.spec.comm;
  if (p.world != setup_.world || schedule.spec.tiles.rank != setup_.rank) {
    throw std::invalid_argument(
        "the schedule is of rank " + std::to_string(schedule.spec.tiles.rank) + " of " +
        std::to_string(p.world) + ", the op of rank " + std::to_string(setup_.rank) + " of " +
        std::to_string(setup_.world));
  }
  if (is_exchange(p.op)) return require_exchange_room(schedule);
  const std::int64_t tiles = tiles_per_chunk(c);
  if (p.op == OpKind::kAGGemm) {
    const std::int64_t signals = c.world * tiles, parts = setup_.scales_travel ? 2 : 1;
    require("signals", signals, setup_.signals);
    require("offers", pulls(schedule) ? signals : 0, setup_.offers);
    require("boxes for other nodes", setup_.remote ? signals * parts : 0, setup_.boxes);
    require("gathered rows", p.m, setup_.rest_offset / setup_.row_bytes);
    if (schedule.spec.in_kernel) {
      require("rows that kernels push", p.m, setup_.pushed_bytes / setup_.row_bytes);
    }
    return;
  }
  const ScatterTiling s{p.m, p.n, p.world, kernels_.at(0)->tile_m(), kernels_.at(0)->tile_n()};
  const std::int64_t sums = relay() ? strip_count(s) : tiles;
  const std::int64_t boxes = setup_.nodes * (sums + (setup_.all_reduce ? tiles : 0));
  require("flags", setup_.nodes * flag_count(s), setup_.signals);
  require("flags of own tiles", schedule.spec.copied ? flag_count(s) : 0, setup_.offers);
  require("strips", relay() ? sums : 0, setup_.strips);
  require("boxes for other nodes", setup_.remote ? boxes : 0, setup_.boxes);
  require("rows of a slot", chunk_rows(p.m, p.world),
          (setup_.slot_bytes - setup_.guard_bytes) / setup_.row_bytes);
  require("rows of the result", setup_.all_reduce ? p.m : 0,
          (setup_.sums_offset - setup_.rest_offset) / setup_.row_bytes);
  if (schedule.spec.in_kernel) {
    require("flags of path in_kernel", flag_count(s), setup_.sum_flags);
    require("words of sums", std::int64_t{p.m} * flag_columns(s),
            setup_.sum_words - setup_.sum_flags);
  }
}

// -- parts of a call -------------------------------------------------------------------------------

// Raises words of each rank of the node. The words of a rank begin at `words[rank]`.
std::vector<MemOp> CudaOp::raise_in_node(const std::vector<Address>& words,
                                         const std::vector<int>& places) const {
  std::vector<MemOp> raised;
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    for (const int place : places) {
      raised.push_back({MemOp::kWrite, words[peer] + place * kWord, epoch_});
    }
  }
  return raised;
}

std::vector<MemOp> CudaOp::await_node(const std::vector<Address>& words) const {
  std::vector<MemOp> waits;
  for (int peer = neighbours().begin; peer < neighbours().end; ++peer) {
    waits.push_back({MemOp::kWait, words[setup_.rank] + peer * kWord, epoch_});
  }
  return waits;
}

// Entry words that this rank raises: its own, and those of the twins whose rows it holds.
std::vector<int> CudaOp::entries() const {
  std::vector<int> words;
  for (int node = 0; node < setup_.nodes; ++node) words.push_back(twin(node));
  return words;
}

// Orders later work on `later` after the work that is on `earlier` now.
void CudaOp::join(Stream later, Stream earlier) {
  driver_->record(joined_, earlier);
  driver_->await_event(later, joined_);
}

void CudaOp::begin(const Schedule& schedule, Stream stream) {
  const Span stage("flux entry");
  capture_ = driver_->capture(stream);
  if (capture_ != 0 && setup_.remote) {
    throw std::invalid_argument("calls between nodes cannot be captured into a CUDA graph");
  }
  refuse_traced_captures();
  words_ = &captured_;
  by_credit_ = false;
  if (capture_ != 0) return begin_captured(schedule, stream);
  const bool behind = read_by_peers(schedule);
  ++epoch_;
  words_ = &eager_[buffer()];
  by_credit_ = has_credit();
  follows_ = true;
  calls_->begin(stream, this, streams_wait(schedule));
  if (traced()) whole_call_ = streams_->begin(stream);
  if (renews_words()) renew_signals(stream);
  if (!behind) fill_with_nan(stream);
  zero_sums(stream);
  if (!by_credit_) enter(stream);
  if (behind && setup_.poison) {
    // Memory that peers read is free only when they have begun this call, too.
    driver_->memory_ops(stream, await_node(words_->entries));
    fill_with_nan(stream);
  }
}

bool CudaOp::streams_wait(const Schedule& schedule) const {
  const bool copied = schedule.spec.tiles.op == OpKind::kAGGemm || schedule.spec.copied;
  return copied || is_exchange(schedule.spec.problem.op) || setup_.remote != nullptr ||
         (setup_.poison && read_by_peers(schedule));
}

bool CudaOp::read_by_peers(const Schedule& schedule) const {
  const bool heads = schedule.spec.problem.op == OpKind::kAllToAllGemm;
  return pulls(schedule) || heads || setup_.sums_by_switch;
}

// Clears the slot that peers add to once they see the entry.
void CudaOp::zero_sums(Stream stream) {
  if (setup_.slots != 1 || setup_.world == 1) return;
  driver_->fill(stream, setup_.data[setup_.rank], 0, setup_.slot_bytes / kWord);
}

// A peer that gives up writes this to this rank's status before it releases its streams. So a read
// of the status after all reads of the call finds every failure that may have corrupted them.
// Kernels read the status when they end (cuda/sync.cuh). If a copy comes after the last kernel, the
// status is copied once more.
void CudaOp::end(Stream stream, bool kernel_reports) {
  if (traced()) streams_->end(whole_call_, stream, record_of(Work::kCall, epoch_));
  if (!kernel_reports) {
    driver_->copy(stream, setup_.report, status_of(setup_.rank), kStatusBytes);
  }
  capture_ != 0 ? driver_->record(captured_end_, stream) : calls_->end(stream);
}

Address CudaOp::status_of(int rank) const {
  return setup_.pads[rank] + 2 * static_cast<Address>(setup_.world) * kWord;
}

// What is known already stays: a peer that gives up next must not hide it.
void CudaOp::look() {
  if (failed()) return;
  driver_->copy(*rescue_, setup_.report, status_of(setup_.rank), kStatusBytes);
  driver_->synchronize(*rescue_);
}

void CudaOp::let_go() {
  for (int rank = neighbours().begin; rank < neighbours().end; ++rank) {
    if (rank == setup_.rank) continue;
    driver_->memory_ops(*rescue_, tell_of_giving_up(status_of(rank), setup_.rank, epoch_));
  }
  if (setup_.remote) setup_.remote->give_up(*rescue_, epoch_);
  const auto words = static_cast<std::size_t>(setup_.signals + setup_.offers);
  driver_->fill(*rescue_, setup_.pads[setup_.rank], epoch_,
                2 * static_cast<std::size_t>(setup_.world));
  driver_->fill(*rescue_, eager_[0].signals[setup_.rank], epoch_, words);
  if (setup_.second_offset != 0) {
    driver_->fill(*rescue_, eager_[1].signals[setup_.rank], epoch_,
                  static_cast<std::size_t>(setup_.signals));
  }
  driver_->fill(*rescue_, captured_.signals[setup_.rank], 1, words);
  driver_->synchronize(*rescue_);
}

FluxSync CudaOp::sync(int launch) const {
  return {number(),
          static_cast<std::uint32_t>(launch),
          setup_.timeout_ns,
          pointer<std::uint64_t>(status_of(setup_.rank)),
          pointer<std::uint64_t>(setup_.report),
          capture_ != 0 ? pointer<const std::uint32_t>(count_) : nullptr,
          pointer<FluxTrace>(kernel_trace_)};
}

FluxGemmArgs CudaOp::gemm_args(const Schedule& schedule, Stream stream, const Operand& operand,
                               int k, int launch) const {
  FluxGemmArgs args{};
  args.m = schedule.spec.problem.m;
  args.n = operand.n;
  args.k = k;
  args.alpha = 1.0f;
  args.b = pointer<const void>(operand.weight);
  args.ldb = operand.ld;
  args.scale_b = pointer<const float>(operand.scale);
  args.order = order_of(schedule);
  args.sync = sync(launch);
  args.sm_count = setup_.sm_count;
  args.device = setup_.device;
  args.groups = groups_.items != nullptr ? &groups_ : nullptr;
  args.all_reduce.scatters = schedule.spec.sums_in_kernel ? 1 : 0;
  const auto room = workspaces_.find(stream);
  if (room != workspaces_.end()) {
    args.workspace = pointer<void>(room->second.first);
    args.workspace_bytes = room->second.second;
  }
  return args;
}

std::uint64_t CudaOp::workspace_bytes(const Schedule& schedule,
                                      const std::vector<Operand>& operands, int k) const {
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].n == 0 && groups_.pushes == nullptr) continue;
    for (int launch = 0; launch < launches(schedule); ++launch) {
      FluxGemmArgs args = is_exchange(schedule.spec.problem.op)
                              ? own_gemm(schedule, 0, operands[i], k)
                              : gemm_args(schedule, 0, operands[i], k);
      if (schedule.spec.split) only_chunk(schedule, launch, &args);
      if (args.m > 0) most = std::max(most, kernels_.at(i)->workspace_bytes(args));
    }
  }
  return most;
}

void CudaOp::set_workspace(Stream stream, Address address, std::uint64_t bytes) {
  workspaces_[stream] = {address, bytes};
}

// -- AllGather -------------------------------------------------------------------------------------

void CudaOp::ag_gemm(const Schedule& schedule, Stream stream, const Rows& x,
                     const std::vector<Operand>& operands, Address gathered,
                     const std::vector<Address>& sources) {
  const Span call("AGGemm", schedule.spec.problem.m);
  require_room(schedule);
  if (schedule.spec.in_kernel) {
    return gather_in_kernel(schedule, stream, x, operands, gathered);
  }
  begin(schedule, stream);
  const auto& rows = gathered_[buffer()];
  const auto& scales = scales_[buffer()];
  std::vector<GatherPart> parts{{x.x, setup_.row_bytes, &rows, sources.empty() ? &rows : &sources}};
  if (setup_.scales_travel) parts.push_back({x.scale, kScaleBytes, &scales, &scales});
  const FluxMeetArgs wait = rows_wait();
  const bool in_place = own_in_place(schedule, x, operands, gathered != 0);
  GatherCall moved{stream,
                   copy_stream_,
                   forked_,
                   number(),
                   by_credit_ ? epoch_ - 1 : number(),
                   parts,
                   capture_ != 0 ? kAllMet : words_->entries,
                   words_->signals,
                   words_->offers,
                   setup_.remote ? neighbours() : Range{0, 0},
                   streams_.get(),
                   kernels_.at(0).get(),
                   setup_.shared ? nullptr : &wait,
                   in_place};
  Gather gather(*driver_, schedule, moved);
  {
    const Span stage("flux own rows");
    gather.publish();
  }
  if (setup_.remote) join(network_stream_, stream);
  std::size_t first = 0;  // kernel
  while (first < operands.size() && operands[first].n == 0) ++first;
  const bool pushes = groups_.pushes != nullptr;  // by the kernel, also where a rank has no columns
  if (pushes) first = 0;
  const bool kernels = first < operands.size();
  const bool beside = capture_ == 0 || setup_.graph_overlap;
  // A GEMM of rows of a peer comes behind a kernel that awaits them: two launches, not one.
  const bool ahead =
      beside && (!schedule.spec.split || chunk_at(schedule.spec.tiles, 0) == setup_.rank);
  if (kernels && ahead) put_kernel(schedule, stream, x, operands, first, 0, in_place);
  {
    const Span stage("flux copies");
    if (setup_.remote) gather_rows(schedule);
    if (!pushes) gather.move();
  }
  if (!beside) join(stream, copy_stream_);
  for (std::size_t i = first; i < operands.size(); ++i) {
    if (operands[i].n == 0 && !pushes) continue;
    for (int launch = ahead && i == first ? 1 : 0; launch < launches(schedule); ++launch) {
      put_kernel(schedule, stream, x, operands, i, launch, in_place);
    }
  }
  // Later work on the stream may overwrite x and reuse the gathered rows.
  if (beside) join(stream, copy_stream_);
  if (by_credit_) enter(copy_stream_);
  if (setup_.remote) join(stream, network_stream_);
  if (!kernels && !pulls(schedule)) {
    await_rows(schedule, stream, !in_place);  // pulled rows: joined above
  }
  if (gathered != 0) {
    const Span stage("flux collect");
    const auto collected = [&] { return record_of(Work::kCollect, epoch_); };
    stamped(streams_.get(), stream, collected, [&] {
      driver_->copy(stream, gathered, rows[setup_.rank],
                    static_cast<std::size_t>(schedule.spec.problem.m) * setup_.row_bytes);
    });
  }
  end(stream, kernels && gathered == 0 && !setup_.remote && !schedule.spec.split);
}

// Launches the multiplication of one weight with the gathered rows: with all, or with the chunk that
// comes as the `launch`-th.
void CudaOp::put_kernel(const Schedule& schedule, Stream stream, const Rows& x,
                        const std::vector<Operand>& operands, std::size_t number, int launch,
                        bool own_in_place) {
  const Span stage("flux kernel");
  const Operand& operand = operands[number];
  const int weights = static_cast<int>(operands.size());
  const int chunk = schedule.spec.split ? chunk_at(schedule.spec.tiles, launch) : 0;
  FluxGemmArgs args =
      gemm_args(schedule, stream, operand, x.k, static_cast<int>(number) + weights * chunk);
  const Address rows = gathered_[buffer()][setup_.rank];
  args.a = pointer<const void>(rows);
  args.lda = x.k;
  args.scale_a =
      pointer<const float>(setup_.scales_travel ? scales_[buffer()][setup_.rank] : x.scale);
  args.d = pointer<void>(operand.out);
  args.ldd = operand.out_ld;
  args.bias = pointer<const void>(operand.bias);
  args.signals = pointer<const std::uint32_t>(words_->signals[setup_.rank]);
  const int own_count = row_count(schedule.spec.problem.m, setup_.world, setup_.rank);
  if (own_in_place && own_count > 0) args.own = pointer<const void>(x.x);
  if (args.groups != nullptr && groups_.pushes != nullptr) {
    args.own = pointer<const void>(x.x);
    for (int peer = 0; peer < setup_.world; ++peer) {
      args.slots[peer] = pointer<void>(gathered_[buffer()][peer]);
      args.flags[peer] = pointer<std::uint32_t>(words_->signals[peer]);
    }
    args.slot_ld = setup_.rest_offset;  // from rows to their scales
    args.entries = pointer<const std::uint32_t>(words_->entries[setup_.rank]);
  }
  if (!schedule.spec.split && args.groups == nullptr) lend_margin(&args);
  if (schedule.spec.split) {
    only_chunk(schedule, chunk, &args);
    if (args.m == 0) return;
    if (chunk != setup_.rank) await_chunk(schedule, stream, chunk);
    const int first = row_begin(schedule.spec.problem.m, setup_.world, chunk);
    const bool own = own_in_place && chunk == setup_.rank;
    args.a = pointer<const void>(own ? x.x : rows + first * setup_.row_bytes);
    args.d = pointer<void>(operand.out + first * operand.out_ld * kOutputBytes);
    if (setup_.scales_travel) args.scale_a += first;
  }
  put_route(stream);
  kernels_.at(number)->launch(args, stream);
}

// Makes the maps of the call's kernel, while rows travel.
void CudaOp::put_route(Stream stream) const {
  if (route_ != nullptr) route_->launch(*kernels_.at(0), sync(0), stream);
}

// Gives a GEMM that waits for rows or entries the multiprocessors of the margin, for as long as it need not.
void CudaOp::lend_margin(FluxGemmArgs* args) const {
  if (!setup_.lends_margin) return;
  args->waiting = args->sm_count;
  args->sm_count += setup_.margin;
}

// Makes a GEMM one of so many rows, which are all of this rank's problem.
void CudaOp::only_rows(int rows, FluxGemmArgs* args) {
  args->m = rows;
  args->order.world = args->order.nodes = args->order.domains = args->order.lanes = 1;
  args->order.rank = args->order.order = args->order.swizzle = 0;
  args->order.sequence = nullptr;
}

// Makes a GEMM one of the rows of a chunk alone, which are there.
void CudaOp::only_chunk(const Schedule& schedule, int chunk, FluxGemmArgs* args) {
  const Problem& p = schedule.spec.problem;
  only_rows(row_count(p.m, p.world, chunk), args);
  args->signals = nullptr;
  args->own = nullptr;
}

// Lets a kernel wait for signals of rows that a stream copies next (docs/kernels/protocol.md).
FluxMeetArgs CudaOp::rows_wait() const {
  FluxMeetArgs args = meeting(words_->signals);
  std::fill(std::begin(args.raised), std::end(args.raised), nullptr);
  args.count = nullptr;
  args.code = FLUX_WAIT_GATHER;
  return args;
}

// Makes a stream wait for all gathered rows, in calls in which no GEMM does so.
void CudaOp::await_rows(const Schedule& schedule, Stream stream, bool own) const {
  for (int owner = 0; owner < setup_.world; ++owner) {
    if (own || owner != setup_.rank) await_chunk(schedule, stream, owner);
  }
}

// Makes a stream wait for the gathered rows of a rank.
void CudaOp::await_chunk(const Schedule& schedule, Stream stream, int owner) const {
  const CommTiling& c = schedule.spec.comm;
  const Range rows{row_begin(c.m, c.world, owner), row_end(c.m, c.world, owner)};
  if (rows.begin == rows.end) return;
  const Range signals = signals_of_rows(c, rows.begin, rows.end);
  FluxMeetArgs args = rows_wait();
  args.first = signals.begin;
  args.awaited_count = signals.end - signals.begin;
  const auto what = [&] {
    return record_of(Work::kWait, epoch_, setup_.rank, owner, 0, rows, setup_.rank, signals.begin);
  };
  stamped(streams_.get(), stream, what, [&] { kernels_.at(0)->meet(args, stream); });
}

}  // namespace flux::host
