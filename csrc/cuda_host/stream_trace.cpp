#include "cuda_host/stream_trace.h"

#include <algorithm>
#include <cstdint>

namespace flux::host {

namespace {

constexpr int kRounds = 16;

// The smallest step between consecutive readings of a clock; 0: it never moved.
std::int64_t least_step(const std::uint64_t* times, int count) {
  std::int64_t least = 0;
  for (int i = 1; i < count; ++i) {
    const auto step = static_cast<std::int64_t>(times[i] - times[i - 1]);
    if (step > 0 && (least == 0 || step < least)) least = step;
  }
  return least;
}

}  // namespace

StreamTrace::StreamTrace(std::shared_ptr<Driver> driver, std::size_t capacity)
    : driver_(std::move(driver)) {
  stretches_.reserve(capacity);
  events_.reserve(2 * capacity);
  try {
    for (std::size_t i = 0; i < 2 * capacity; ++i) {
      events_.push_back(driver_->create_timed_event());
    }
    reference_ = driver_->create_timed_event();
  } catch (...) {
    close();
    throw;
  }
}

StreamTrace::~StreamTrace() { close(); }

void StreamTrace::close() {
  for (const Event event : events_) driver_->destroy_event(event);
  events_.clear();
  stretches_.clear();
  used_ = 0;
  if (reference_ != 0) driver_->destroy_event(reference_);
  reference_ = 0;
}

int StreamTrace::begin(Stream stream) {
  if (2 * used_ == events_.size()) {
    ++dropped_;
    return kNone;
  }
  const int token = static_cast<int>(used_++);
  driver_->record(event(token, false), stream);
  return token;
}

void StreamTrace::end(int token, Stream stream, const Record& what) {
  end(token, stream, std::vector<Record>{what});
}

void StreamTrace::end(int token, Stream stream, const std::vector<Record>& what) {
  if (token == kNone) return;
  driver_->record(event(token, true), stream);
  for (const Record& record : what) stretches_.push_back({stream, token, record});
}

// One round:   host   begin ------------------------------------ end
//              device        event | kernel reads its clock | event
// Whatever the delays are, both events lie between the host's two readings of its clock, and the
// kernel's reading lies between the events. The round that was quickest for the host relates the
// events to the host's clock. The round whose events are closest relates the kernel's clock to the
// events.
ClockTie StreamTrace::tie(Stream stream, const Kernel* kernel, std::uint64_t* times) {
  struct Round {
    Event first, last;
    std::int64_t begin, end, apart;
  };
  std::vector<Round> rounds(kRounds);
  const std::shared_ptr<void> owned(nullptr, [&](void*) {
    for (const Round& r : rounds) {
      for (const Event event : {r.first, r.last}) {
        if (event != 0) driver_->destroy_event(event);
      }
    }
  });
  for (Round& r : rounds) {
    r.first = driver_->create_timed_event();
    r.last = driver_->create_timed_event();
  }
  driver_->synchronize(stream);
  for (int i = 0; i < kRounds; ++i) {
    Round& r = rounds[i];
    r.begin = Lane::now();
    driver_->record(r.first, stream);
    if (kernel != nullptr) kernel->stamp(times + i, 1, stream);
    driver_->record(r.last, stream);
    driver_->synchronize(stream);
    r.end = Lane::now();
    r.apart = static_cast<std::int64_t>(driver_->elapsed_ns(r.first, r.last));
  }
  const auto host = std::min_element(rounds.begin(), rounds.end(), [](auto& one, auto& other) {
    return one.end - one.begin < other.end - other.begin;
  });
  tie_.event_ns = host->begin + (host->end - host->begin - host->apart) / 2;
  tie_.uncertainty_ns = (host->end - host->begin + 1) / 2;
  if (kernel != nullptr) {
    const auto close = std::min_element(rounds.begin(), rounds.end(), [](auto& one, auto& other) {
      return one.apart < other.apart;
    });
    const auto between = [&](const Round& one, const Round& other) {
      return static_cast<std::int64_t>(driver_->elapsed_ns(one.first, other.first));
    };
    const std::int64_t after = close < host ? -between(*close, *host) : between(*host, *close);
    const auto reading = static_cast<std::int64_t>(times[close - rounds.begin()]);
    tie_.offset_ns = tie_.event_ns + after + close->apart / 2 - reading;
    tie_.between_ns = (close->apart + 1) / 2;
    kernel->stamp(times, kStamps, stream);
    driver_->synchronize(stream);
    tie_.resolution_ns = least_step(times, kStamps);
  }
  std::swap(reference_, host->first);
  return tie_;
}

std::vector<std::pair<Stream, Record>> StreamTrace::read() const {
  // All times are distances from one event. The driver returns distances in single precision, which
  // is 60 ns after a second. All are rounded in the same way, so the order of events is kept.
  const auto at = [this](Event event) {
    return tie_.event_ns + static_cast<std::int64_t>(driver_->elapsed_ns(reference_, event));
  };
  std::vector<std::pair<Stream, Record>> all;
  for (const Stretch& stretch : stretches_) {
    Record record = stretch.what;
    record.begin_ns = at(event(stretch.token, false));
    record.end_ns = at(event(stretch.token, true));
    all.emplace_back(stretch.stream, record);
  }
  return all;
}

}  // namespace flux::host
