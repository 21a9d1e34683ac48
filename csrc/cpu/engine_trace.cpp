// Trace records of the engine (lane.h). Nothing here runs without a trace.
#include "cpu/engine.h"

namespace flux::host {

namespace {
// A worker thread serves one engine only, so this flag distinguishes the engine's two threads.
thread_local bool is_worker = false;
}  // namespace

void Engine::become_worker() { is_worker = true; }

Lane* Engine::lane_of_this_thread() const { return is_worker ? lanes_.worker : lanes_.caller; }

void Engine::trace(const Lanes& lanes) { lanes_ = lanes; }

void Engine::record(Work work, std::int64_t began, const Transfer& t, int peer, int at,
                    std::int64_t bytes) {
  lane()->add(Record{began, 0, epoch_, work, peer, t.chunk, t.tile, t.rows, at,
                     at < 0 ? -1 : t.signal, bytes});
}

void Engine::record_wait(Work work, std::int64_t began, int peer, const Transfer* what, int at,
                         int signal) {
  Record record{began, 0, epoch_, work, peer, -1, -1, {0, 0}, at, signal, 0};
  if (what != nullptr) {
    record.chunk = what->chunk;
    record.tile = what->tile;
    record.range = what->rows;
  }
  lane()->add_wait(record);
}

}  // namespace flux::host
