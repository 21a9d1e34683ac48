#include "cuda_host/calls.h"

namespace flux::host {

std::shared_ptr<Calls> Calls::of(const std::shared_ptr<Driver>& driver, int lane) {
  std::weak_ptr<Calls>& kept = driver->calls[lane];
  std::shared_ptr<Calls> calls = kept.lock();
  if (!calls) kept = calls = std::make_shared<Calls>(driver);
  return calls;
}

Calls::Calls(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)), ended_(driver_->create_event()) {}

Calls::~Calls() {
  for (const Ends& ends : waits_) spare_.insert(spare_.end(), {ends.begun, ends.ended});
  for (const Event event : spare_) driver_->destroy_event(event);
  driver_->destroy_event(ended_);
}

void Calls::begin(Stream stream, const void* op, bool waits) {
  if (last_ != 0 && stream_ != stream) driver_->await_event(stream, last_);
  stream_ = stream;
  in_waits_ = waits;
  if (!waits) return;
  const Event begun = event(), ended = event();
  waits_.push_back({{op, ++number_}, begun, ended});
  driver_->record(begun, stream);
}

void Calls::end(Stream stream) {
  last_ = in_waits_ ? waits_.back().ended : ended_;
  driver_->record(last_, stream);
}

// Events are created only while more calls are on streams than ever before.
Event Calls::event() {
  if (spare_.empty()) forget_ended();
  if (spare_.empty()) return driver_->create_event();
  const Event event = spare_.back();
  spare_.pop_back();
  return event;
}

// A call that failed on the host has no end: an event that is not recorded counts as passed.
void Calls::forget_ended() {
  while (!waits_.empty() && driver_->passed(waits_.front().ended)) {
    if (last_ == waits_.front().ended) last_ = 0;
    spare_.insert(spare_.end(), {waits_.front().begun, waits_.front().ended});
    waits_.pop_front();
  }
}

std::optional<Calls::Call> Calls::waiting() {
  forget_ended();
  if (waits_.empty() || !driver_->passed(waits_.front().begun)) return std::nullopt;
  return waits_.front().call;
}

}  // namespace flux::host
