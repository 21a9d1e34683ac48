// Streams of the emulated device: see device.h.
#include <optional>
#include <set>

#include "device.h"

namespace emulated {

namespace {

constexpr std::chrono::seconds kEndOfFailed{1};

std::atomic<int> streams_made{0};
// Everything is submitted in one order, that of the hardware queues too.
std::mutex submitting;

std::mutex listing;
std::set<const Stream*>& streams() {  // that have not been destroyed
  static auto* const all = new std::set<const Stream*>;
  return *all;
}

}  // namespace

struct Stream::Entry {
  Item item;
  Queue* queue = nullptr;
  std::uint64_t ticket = 0;
  bool over = false;           // the last of its stream
  std::unique_ptr<Grid> grid;  // of a kernel that has started
  bool queued = false;         // whether its ticket is still there
  Clock::time_point began = {};
  Stream* stream = nullptr;
  // Of what is no stand-in kernel: whether it has let the next item start; whether it has ended; the
  // thread in which it has started early.
  bool released = false;
  std::shared_ptr<std::atomic<bool>> ended = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<bool>> before;  // of the item before it; null: it has ended
  std::uint64_t submitted = 0;                // what the host knew then
  std::thread beside;
  std::atomic<bool> beside_ended{false};

  bool may_start() const { return !queued || queue->at_head(ticket); }
  // The calling thread runs it.
  void begin() const {
    const Ordering* const tell = ordering;
    if (tell != nullptr) tell->begins(stream->number_, submitted);
  }
  void leave_queue() {
    if (std::exchange(queued, false)) queue->leave(ticket);
  }
};

namespace {

thread_local Stream::Entry* running = nullptr;

}  // namespace

void release_next() {
  Stream::Entry* const entry = running;
  if (entry == nullptr) return;
  Stream& stream = *entry->stream;
  const std::lock_guard<std::mutex> hold(stream.mutex_);
  entry->released = true;
  if (stream.entries_.size() > 1 && stream.entries_.front().get() == entry) {
    stream.start_beside(stream.entries_[1], stream.entries_.front());
  }
}

bool predecessor_ended() {
  return running == nullptr || running->before == nullptr || *running->before;
}

Stream::Stream(bool is_default)
    : is_default_(is_default),
      number_(is_default ? 0 : ++streams_made),
      gpu_(is_default ? 0 : current_gpu()),
      thread_([this] { work(); }) {
  if (is_default_) return;
  ++device().streams_alive;
  const std::lock_guard<std::mutex> lock(listing);
  streams().insert(this);
}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(listing);
    streams().erase(this);
  }
  auto last = std::make_shared<Entry>();
  last->over = true;
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    entries_.push_back(last);
    changed_.notify_all();
  }
  thread_.join();
  tell_awaited();
  if (!is_default_) --device().streams_alive;
}

Stream* stream_of(void* handle) {
  static auto* const by_default = new Stream(true);
  if (handle == nullptr) return by_default;
  auto* const stream = static_cast<Stream*>(handle);
  const std::lock_guard<std::mutex> lock(listing);
  if (streams().count(stream) != 0) return stream;
  device().fail("a stream is used after it was destroyed");
  return by_default;
}

std::uintptr_t Stream::handle() const {
  return is_default_ ? 0 : reinterpret_cast<std::uintptr_t>(this);
}

// The host goes on when there is a place. If the stream waits for what the same thread would put on another
// one later, it never does: that is an error.
void Stream::await_place() {
  const std::size_t places = device().places;
  if (places == 0) return;
  std::unique_lock<std::mutex> hold(mutex_);
  const Entry* first = nullptr;
  auto since = Clock::now();
  while (entries_.size() >= places && !device().failed()) {
    if (const Entry* const now_first = entries_.front().get(); now_first != first) {
      first = now_first;
      since = Clock::now();
    }
    if (Clock::now() - since > std::chrono::milliseconds(device().full_ms)) {
      return device().fail("a stream is full: the host waits for one of its " +
                           std::to_string(places) + " places, and the first operation (" +
                           first->item.what + ") does not end");
    }
    turns().let_go();
    device().land_what_is_due();
    changed_.wait_for(hold, std::chrono::milliseconds(10));
  }
}

void Stream::put(Item item, bool of_graph) {
  launched_last_ = item.kind == Item::kKernel;
  if (capture != nullptr) return capture->add(this, std::move(item));
  if (!of_graph) await_place();
  auto entry = std::make_shared<Entry>();
  entry->item = std::move(item);
  if (entry->item.kind == Item::kKernel) ++device().kernels;
  const std::lock_guard<std::mutex> in_order(submitting);
  entry->queue = device().queue(number_);
  if (entry->queue != nullptr) {
    entry->ticket = entry->queue->enter();
    entry->queued = true;
  }
  entry->stream = this;
  if (const Ordering* const tell = ordering; tell != nullptr) entry->submitted = tell->submitted();
  const std::lock_guard<std::mutex> hold(mutex_);
  entries_.push_back(entry);
  turns().join(2 * number_);
  if (entries_.size() == 2 && entries_.front()->released) start_beside(entry, entries_.front());
  changed_.notify_all();
}

// With the lock: starts an early item that the one before it has released.
void Stream::start_beside(const std::shared_ptr<Entry>& entry,
                          const std::shared_ptr<Entry>& before) {
  if (!entry->item.early || entry->beside.joinable() || !entry->may_start()) return;
  entry->leave_queue();
  entry->before = before->ended;
  entry->began = Clock::now();
  const int turn = 2 * number_ + 1;
  turns().join(turn);
  entry->beside = std::thread([entry, turn] {
    turns().enter(turn);
    running = entry.get();
    entry->begin();
    entry->item.run();
    entry->beside_ended = true;
    turns().leave();
  });
}

int Stream::launch(Work work) {
  if (work.early && !launched_last_) {
    device().fail(work.name + " is launched early behind what is no kernel");
    return kLaunchFailure;
  }
  device().log_call("launch", handle(),
                    "kernel=" + work.name + ";blocks=" + std::to_string(work.blocks) +
                        ";early=" + std::to_string(work.early ? 1 : 0));
  Item item;
  item.kind = Item::kKernel;
  item.what = work.name;
  item.work = std::make_shared<const Work>(std::move(work));
  put(std::move(item));
  return 0;
}

bool Stream::idle() {
  turns().let_go();
  const std::lock_guard<std::mutex> hold(mutex_);
  if (entries_.empty()) tell_awaited();
  return entries_.empty();
}

// The host knows that all is done.
void Stream::tell_awaited() const {
  if (const Ordering* const tell = ordering; tell != nullptr) tell->awaited(number_);
}

void Stream::drain() {
  std::unique_lock<std::mutex> hold(mutex_);
  // What runs on a device that has failed ends soon. It must not write to memory that the host frees then.
  std::optional<Clock::time_point> failed_at;
  while (!entries_.empty()) {
    if (device().failed() && !failed_at) failed_at = Clock::now();
    if (failed_at && Clock::now() - *failed_at > kEndOfFailed) break;
    turns().let_go();
    device().land_what_is_due();
    changed_.wait_for(hold, std::chrono::milliseconds(10));
  }
  if (entries_.empty()) tell_awaited();
}

void Stream::work() {
  bool has_turn = false;
  current_gpu() = gpu_;
  for (;;) {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [this] { return !entries_.empty(); });
    const std::shared_ptr<Entry> entry = entries_.front();  // counted until it has run
    hold.unlock();
    if (entry->over) return;
    if (!has_turn) turns().enter(2 * number_);
    run(entry);
    hold.lock();
    entries_.pop_front();
    changed_.notify_all();
    has_turn = turns().on() && !entries_.empty();
    if (!has_turn) turns().leave();
    hold.unlock();
    if (has_turn) turns().yield();
  }
}

void Stream::run(const std::shared_ptr<Entry>& entry) {
  if (entry->item.kind == Item::kKernel) return run_kernel(entry);
  for (Naps naps; !entry->may_start();) naps.next();
  std::unique_lock<std::mutex> hold(mutex_);
  const bool started = entry->beside.joinable();
  hold.unlock();
  if (started) {
    for (Naps naps; turns().on() && !entry->beside_ended;) naps.next();
    entry->beside.join();
  } else {
    entry->began = Clock::now();
    if (entry->item.leaves_at_start) entry->leave_queue();
    running = entry.get();
    entry->begin();
    entry->item.run();
    running = nullptr;
  }
  *entry->ended = true;
  entry->leave_queue();
  device().log_time(entry->item.what, handle(), entry->began);
}

// The kernel behind it, if that is to start early.
std::shared_ptr<Stream::Entry> Stream::behind(const std::shared_ptr<Entry>& entry) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (entries_.size() < 2 || entries_.front() != entry) return nullptr;
  const std::shared_ptr<Entry>& next = entries_[1];
  return next->item.kind == Item::kKernel && next->item.work->early ? next : nullptr;
}

void Stream::start(Entry& entry) {
  entry.grid = std::make_unique<Grid>(entry.item.work, handle(), gpu_);
  entry.began = Clock::now();
  device().start(entry.grid.get());
}

// Steps the kernel, and one behind it that may start when all blocks of this one have been placed.
void Stream::run_kernel(const std::shared_ptr<Entry>& entry) {
  if (entry->grid == nullptr) {
    for (Naps naps; !entry->may_start();) naps.next();
    start(*entry);
  }
  for (Naps naps; !entry->grid->over();) {
    bool moved = entry->grid->step();
    if (entry->grid->placed()) {
      entry->leave_queue();
      if (const auto next = behind(entry)) {
        if (next->grid == nullptr && next->may_start()) {
          next->leave_queue();
          start(*next);
        }
        if (next->grid != nullptr) moved |= next->grid->step();
      }
    }
    naps.next_unless(moved);
  }
  entry->leave_queue();
  device().end(entry->grid.get());
  --device().kernels;
  device().log_time(entry->item.what, handle(), entry->began, "kernel");
}

}  // namespace emulated
