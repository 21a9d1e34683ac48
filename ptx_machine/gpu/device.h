// The device behind driver.cpp: streams that are threads, hardware queues, multiprocessors on
// which blocks of kernels find room or do not, and what it keeps for tests: the first illegal thing that
// was done, a note of a kernel that finds no room, and a log.
//
// Definitions are in device.cpp and not inline: what is inline is one for all libraries of a
// process.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ordering.h"
#include "turns.h"

namespace emulated {

using Clock = std::chrono::steady_clock;

constexpr int kLaunchFailure =
    719;                     // CUDA_ERROR_LAUNCH_FAILED: nothing works on the device any more
constexpr int kRefused = 1;  // CUDA_ERROR_INVALID_VALUE
constexpr int kNotSupported = 801;

constexpr int kMultiprocessors = 8;  // of each GPU
constexpr int kGpus = 16;            // that the streams of a process can be on
constexpr int kPlaces = 1024;        // of a stream, for what was put on it and is not done
constexpr std::uint64_t kClockOffset = 3'000'000'000'000'000;  // 35 days

// The device's clock, in nanoseconds: the host's, so far off that nothing takes one for the other.
inline std::uint64_t now() {
  return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1) + kClockOffset;
}

inline std::uint32_t load(const std::uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store(std::uint32_t* word, std::uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
// Whether a word has reached a value, as CU_STREAM_WAIT_VALUE_GEQ compares: values wrap around.
inline bool reached(std::uint32_t seen, std::uint32_t value) {
  return static_cast<std::int32_t>(seen - value) >= 0;
}
// Of a thread that waits: each lets others go on until this thread's next turn, or for a moment. The moments
// become longer, up to a small part of the wait so far: who waits takes time from those that it waits for.
class Naps {
 public:
  void next() {
    if (turns().yield()) return;
    constexpr int kAlike = 16, kMostDoubled = 5;
    const int doubled = std::min(in_a_row_++ / kAlike, kMostDoubled);
    std::this_thread::sleep_for(std::chrono::microseconds(20 << doubled));
  }

  void next_unless(bool moved) {
    if (!moved) return next();
    in_a_row_ = 0;
  }

 private:
  int in_a_row_ = 0;
};

// Now and then takes as long as tests have asked for.
void dawdle();

// Null: nothing follows in which order memory is accessed.
extern std::atomic<const Ordering*> ordering;

// Whether some of a range is reserved (cuMemAddressReserve), and not mapped with access: no longer, or not yet.
bool is_unmapped(std::uintptr_t address, std::size_t bytes);

// The GPU that the calling thread acts for: of a stream's thread, the stream's; else the one that the next
// stream is made on.
int& current_gpu();

// Writes memory as a copy or a kernel of the current GPU does. If that is memory of another one, and late
// writes are asked for, the data lands later than words that are written after it.
void write(std::uintptr_t to, const void* from, std::size_t bytes);

// Copies, or fills if there is no source; whether whole words are written.
template <class Copy>
void observed(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, bool words, Copy&& copy) {
  const Ordering* const tell = ordering;
  if (tell != nullptr) tell->copies(to, from, bytes, words ? 1 : 0, 0);
  copy();
  if (tell != nullptr) tell->copies(to, from, bytes, words ? 1 : 0, 1);
}

// What comes behind a point of a stream waits until it is raised.
struct Signal {
  std::atomic<bool> is_raised{false};
  std::shared_ptr<void> known;  // to the stream that raises it

  Signal() = default;
  explicit Signal(bool raised) : is_raised(raised) {}
};
using Flag = std::shared_ptr<Signal>;
void raise(const Flag& flag);
void await(const Flag& flag);

// -- kernels ---------------------------------------------------------------------------------------

// What a block takes of a multiprocessor.
struct Footprint {
  int threads = 256;
  int registers = 32;  // of a thread
  int shared = 0;      // bytes
};

// Where something is done.
struct Place {
  int block = 0;
  int sm = 0;
};

// A word that a unit of work waits for.
struct Wait {
  const std::uint32_t* words;
  int index;
  std::uint32_t value;
  const char* name;  // of the words, for messages
  int code, row;     // for the callbacks of the work
};

// A launch: blocks that do units of work one after the other, block b those of b, b + blocks, ...
struct Work {
  std::string name;
  Footprint footprint;
  int blocks = 1;
  int units = 1;
  bool early = false;  // programmatic stream serialization: may start beside the launch before it
  // What its waits do; only work that waits needs these.
  std::chrono::nanoseconds patience{0};                       // of one wait
  std::function<bool()> abandoned;                            // whether no wait is made any more
  std::function<void(const Wait&, std::uint32_t seen)> late;  // a wait is out of patience
  std::function<void(const Wait&, std::uint64_t since, Place)> waited;  // it came, but not at once
  std::function<void()> over;                                           // the last block has ended
  std::function<void(int unit, std::vector<Wait>* waits)> open;
  std::function<void(int unit, const std::vector<bool>& came, Place at)> close;
};

// One execution of it. The thread of its stream steps its blocks.
class Grid {
 public:
  Grid(std::shared_ptr<const Work> work, std::uintptr_t stream, int gpu);
  // Places blocks that find room, and goes on with those that have it; whether anything moved.
  bool step();
  bool placed() const { return placed_ == work_->blocks; }
  bool over() const { return over_ == work_->blocks; }
  const Work& work() const { return *work_; }
  // "flag 3" and so on, of the first block that waits.
  std::string waits_for() const;

 private:
  friend class Device;
  struct Block {
    int sm = -1;
    int unit = 0;
    bool open = false;
    bool looked = false;  // at the current wait
    std::size_t next = 0;
    std::vector<Wait> waits;
    std::vector<bool> came;
    Clock::time_point since;
    std::uint64_t stamp = 0;
    // What it waits for, for other threads; a null name: nothing.
    std::atomic<const char*> name{nullptr};
    std::atomic<int> index{0};
  };
  enum class Seen { kCame, kGivenUp, kNotYet };
  bool step_block(Block& block, int number);
  Seen look(Block& block, int number);
  void end_block(Block& block);

  std::shared_ptr<const Work> work_;
  std::uintptr_t stream_;
  const int gpu_;
  std::unique_ptr<Block[]> blocks_;
  std::atomic<int> placed_{0}, over_{0};
  Clock::time_point unplaced_since_ = Clock::now();
  bool noted_ = false;
};

// -- the device ------------------------------------------------------------------------------------

// Streams share hardware queues when there are few: what is submitted to a queue starts in that order.
class Queue {
 public:
  std::uint64_t enter();
  bool at_head(std::uint64_t ticket);
  void leave(std::uint64_t ticket);

 private:
  std::mutex mutex_;
  std::uint64_t next_ = 1;
  std::deque<std::uint64_t> tickets_;
};

struct Memory {
  std::uintptr_t base;
  std::size_t bytes;
};

class Device {
 public:
  std::atomic<int> delay_us{0};
  std::atomic<int> copy_us{0}, launch_us{0};
  std::atomic<bool> copies_refused{false}, launches_refused{false};
  std::atomic<bool> limits_room{false}, loads_lazily{false};
  std::atomic<bool> copies_need_room{false}, kernels_first{false}, peer_atomics{true};
  std::atomic<int> starving_ms{5000}, loading_ms{5000}, full_ms{20000};
  std::atomic<int> places{kPlaces};  // of each stream; 0: any number
  std::atomic<int> streams_alive{0}, timed_events{0};
  std::atomic<int> kernels{0};     // launched, and not over
  std::atomic<int> generation{1};  // counts resets, which leave no module loaded

  // The sticky error: the first illegal thing.
  void fail(const std::string& text);
  bool failed() const { return failed_; }
  std::string error();
  void clear_error();

  // Room on multiprocessors. Kernels are placed in the order in which they became ready to start.
  void start(Grid* grid);
  int place(Grid* grid);  // one block: a multiprocessor, or -1
  void leave(Grid* grid, int sm);
  void end(Grid* grid);
  void note_starving(Grid* grid);
  std::string starved();
  bool resident();  // whether a kernel has a block on a multiprocessor
  // Waits until no kernel has a block on a multiprocessor, or is about to; false, with a sticky error,
  // if that takes too long.
  bool load_module(const std::string& what);

  Queue* queue(int stream);  // null: streams share none
  void set_queues(int count);

  // Memory of the host, and of other devices. Of the latter no stream may wait for a word.
  void add_host_memory(Memory memory);
  void forbid_waits(Memory memory);
  // Whether the first use of this kind towards another device, which may load code, is legal now.
  bool first_use(const char* kind, std::uintptr_t address);
  bool waits_forbidden(std::uintptr_t address);
  bool is_own(std::uintptr_t address);

  // Memory of one of several GPUs. Writes by others land there after `late_us`, or when a kernel of that
  // GPU has seen a word that it waits for: what a stream waits for orders none of them.
  std::atomic<int> late_us{0};
  void add_gpu_memory(Memory memory, int gpu);
  void write(std::uintptr_t to, const void* from, std::size_t bytes);
  void land(int gpu);  // all
  void land_what_is_due();

  // The log: lines of tab-separated fields.
  void record(bool on);
  bool records() const { return recording_; }
  void log_call(const std::string& name, std::uintptr_t stream, const std::string& details);
  void log_time(const std::string& what, std::uintptr_t stream, Clock::time_point begin,
                const std::string& details = "");
  std::string calls();
  std::string timeline();

  void reset();

 private:
  struct Multiprocessor {
    int threads = 0, registers = 0, blocks = 0, shared = 0;
  };
  bool has_room(const Multiprocessor& sm, const Footprint& block) const;
  std::string holders(const Grid* but);

  std::mutex mutex_;
  std::atomic<bool> failed_{false}, recording_{false};
  std::string error_, starved_;
  Multiprocessor sms_[kGpus][kMultiprocessors];
  std::vector<Grid*> active_;  // from when they may start until they end
  int next_sm_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_, retired_;
  std::vector<Memory> host_, peers_;
  std::set<std::pair<std::string, std::uintptr_t>> used_;  // towards other devices
  struct Late {
    int gpu;
    std::uintptr_t to;
    std::vector<char> data;
    Clock::time_point due;
  };
  std::mutex landing_;
  std::vector<std::pair<Memory, int>> gpu_memory_;
  std::deque<Late> late_;
  std::vector<std::string> calls_, times_;
};

Device& device();

// -- streams ---------------------------------------------------------------------------------------

struct Graph;

// What is put on a stream.
struct Item {
  enum Kind { kKernel, kCopy, kOther } kind = kOther;
  std::string what;
  std::function<void()> run;         // but for kernels
  std::shared_ptr<const Work> work;  // of kernels
  bool leaves_at_start = false;      // its hardware queue; else when it is done
  bool early = false;                // may start when the item before it has called release_next
};

// Of the item that the calling thread runs: lets an early one behind it start.
void release_next();
// Whether the item before it on the stream has ended.
bool predecessor_ended();

class Stream {
 public:
  struct Entry;
  Graph* capture = nullptr;  // that takes what is put here; only threads of the host look at it

  explicit Stream(bool is_default);
  ~Stream();
  // The host waits where the stream is full; with `of_graph`, it does not: a replay is one thing.
  void put(Item item, bool of_graph = false);
  // A launch; with `early`, behind another one.
  int launch(Work work);
  bool idle();
  void drain();  // waits a moment only when the device has failed
  std::uintptr_t handle() const;
  void tell_awaited() const;
  int number() const { return number_; }
  int gpu() const { return gpu_; }

 private:
  void work();
  void await_place();
  void run(const std::shared_ptr<Entry>& entry);
  void run_kernel(const std::shared_ptr<Entry>& entry);
  std::shared_ptr<Entry> behind(const std::shared_ptr<Entry>& entry);
  void start_beside(const std::shared_ptr<Entry>& entry, const std::shared_ptr<Entry>& before);
  friend void release_next();
  void start(Entry& entry);

  const bool is_default_;
  const int number_;
  const int gpu_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Entry>> entries_;
  bool launched_last_ = false;  // the last thing that was put here was a kernel
  std::thread thread_;
};

// The default stream has handle 0, as torch's has.
Stream* stream_of(void* handle);

inline Item item(const char* what, std::function<void()> run) {
  Item made;
  made.what = what;
  made.run = std::move(run);
  return made;
}

// What was put on streams while they were captured.
struct Graph {
  struct Node {
    int stream;  // in order of appearance; 0 is the one on which the capture began
    Item item;
    int records = -1, awaits = -1;  // events, by number
  };
  std::uint64_t id;
  std::vector<Stream*> streams;  // while they are captured; null: destroyed meanwhile
  std::vector<Node> nodes;
  int events = 0;
  bool invalid = false;  // something was done that a capture forbids

  int index(Stream* stream);
  void add(Stream* stream, Item item, int records = -1, int awaits = -1);
  void end();
  bool joined() const;  // whether the first stream comes behind all that others do
  // For each node, those right behind which it comes.
  std::vector<std::set<int>> edges() const;
};

struct Event {
  bool timed = false;
  Flag done = std::make_shared<Signal>(true);
  std::shared_ptr<std::uint64_t> passed = std::make_shared<std::uint64_t>(0);  // when
  std::uint64_t capture = 0;  // of its last record; 0: none
  int number = 0;             // within that
};

constexpr int kUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

// Whether a call that waits for a stream, or asks for it, is made while that is captured; ends that.
bool forbidden_in_capture(Stream* stream);
// Whether the record of an event has become a part of a graph.
bool captured_record(Event* event, Stream* stream);
// The same of a wait; what is not allowed is an error.
int captured_wait(const Event* event, Stream* stream, bool* captured);
// Before a stream is destroyed.
void leave_capture(Stream* stream);

// A graph that can be launched. A launch does the nodes again, on the stream that it is launched on and
// on streams of its own, with events of its own; or (kernels_first) one after the other, in an order
// that stream order and events allow. Launches of one graph follow one another.
class GraphExec {
 public:
  explicit GraphExec(const Graph& graph);
  void launch(Stream* on);

 private:
  void launch_in_turn(Stream* on);

  std::vector<Graph::Node> nodes_;
  std::vector<std::set<int>> edges_;
  int events_;
  std::vector<std::unique_ptr<Stream>> own_;
  Flag last_ = std::make_shared<Signal>(true);  // whether the last launch has ended
};

}  // namespace emulated
