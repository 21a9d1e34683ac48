// The sums of collectives.h, and where their bytes are in the result.
#include <cstring>

#include "cpu/collectives.h"

namespace flux::host {

// Sums the shares of this host's ranks, in rank order; the own one is read where the caller has it.
void Collectives::sum_of_host(const Part& part, std::size_t round, char* to) {
  std::vector<const void*> sources;
  for (const int member : members_) {
    sources.push_back(member == rank_ ? call_->in + part.at
                                      : in_slot(member, round) + part.in_slot);
  }
  sum(sources, to, part.at, part.bytes, false);
}

void Collectives::step_sum(std::size_t round) {
  const Round& plan = plan_of(round);
  for (const auto& [link, count] : plan.needs) await_arrived(*link, count);
  const Collective kind = call_->kind;
  const int host = placement_.host(rank_), hosts = placement_.hosts();
  // What is sent from the caller's memory is not overwritten before it is with the kernel.
  if (!shares_ && call_->in == call_->out) await_sent(plan);
  for (const Part& part : plan.parts) {
    if (kind == Collective::kAllGather) break;
    const bool own =
        kind == Collective::kAllReduce ? handler(host, part.index) == rank_ : part.index == rank_;
    if (!own) continue;
    std::vector<const void*> sources;
    for (int other = 0; other < hosts; ++other) {
      if (other != host) {
        sources.push_back(received(other, round) +
                          (kind == Collective::kAllReduce ? part.in_slot : 0));
      } else if (shares_ && kind == Collective::kAllReduce && hosts > 1) {
        sources.push_back(sums_.data() + parity(round) * slot_bytes_ + part.in_slot);
      } else {
        for (const int member : members_) {
          sources.push_back(member == rank_ ? call_->in + part.at
                                            : in_slot(member, round) + part.in_slot);
        }
      }
    }
    char* to = kind == Collective::kReduceScatter ? call_->out + (part.at - call_->offsets[rank_])
               : shares_                          ? out_slot(rank_, round) + part.in_slot
               : call_->block_columns != 0        ? nullptr
                                                  : call_->out + part.at;
    sum(sources, to, part.at, part.bytes, true);
  }
  if (shares_) raise(flags(rank_).out, round);
}

// Calls `visit(at, bytes, to, column)` for each part of a range of the vector that lies in one row of a
// block: where it lies in the vector, in the result, and its first column. Without blocks a block is
// all columns; without a bias too, what lies in one row does not matter.
template <class Visit>
void Collectives::each_run(std::size_t at, std::size_t bytes, Visit&& visit) const {
  const std::size_t blocks = call_->block_columns;
  if (blocks == 0 && call_->bias == nullptr) return visit(at, bytes, at, std::size_t{0});
  const std::size_t item = size_of(call_->dtype), columns = call_->columns;
  const std::size_t rows = call_->offsets.back() / (columns * item);
  for (const std::size_t end = at + bytes; at < end;) {
    const std::size_t element = at / item;
    const std::size_t first = blocks == 0 ? 0 : element / (rows * blocks) * blocks;
    const std::size_t width = blocks == 0 ? columns : std::min(blocks, columns - first);
    const std::size_t inside = element - rows * first, column = first + inside % width;
    const std::size_t length = std::min((width - inside % width) * item, end - at);
    visit(at, length, (inside / width * columns + column) * item, column);
    at += length;
  }
}

// Copies a range of the vector to where its rows are in the result.
void Collectives::to_rows(const char* from, std::size_t at, std::size_t bytes) {
  if (call_->block_columns == 0) {
    std::memcpy(call_->out + at, from, bytes);
    return;
  }
  const std::size_t begin = at;
  each_run(at, bytes, [&](std::size_t here, std::size_t length, std::size_t to, std::size_t) {
    std::memcpy(call_->out + to, from + (here - begin), length);
  });
}

// `to`: null if the result has other blocks than the vector, and is where its rows are in `out`.
void Collectives::sum(const std::vector<const void*>& sources, char* to, std::size_t at,
                      std::size_t bytes, bool is_result) {
  if (bytes == 0) return;
  const std::size_t item = size_of(call_->dtype), count = bytes / item;
  ReduceArgs args{
      call_->dtype, sources.data(), static_cast<int>(sources.size()), to, nullptr, count, count,
      1.0};
  if (!is_result) return reduce(args);
  args.scale = call_->scale;
  std::vector<const void*> shifted(sources.size());
  // Parts begin and end anywhere in a row.
  each_run(at, bytes,
           [&](std::size_t here, std::size_t length, std::size_t result, std::size_t column) {
             const std::size_t done = here - at;
             for (std::size_t i = 0; i < sources.size(); ++i) {
               shifted[i] = static_cast<const char*>(sources[i]) + done;
             }
             args.sources = shifted.data();
             args.out = to == nullptr ? call_->out + result : to + done;
             if (call_->bias != nullptr) args.bias = call_->bias + column * item;
             args.count = args.columns = length / item;
             reduce(args);
           });
}

}  // namespace flux::host
