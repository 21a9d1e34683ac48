// The clock of deadlines. It counts only the time in which the calling thread could look.
//
// While a process is stopped (SIGSTOP, `docker pause`, a suspended virtual machine) the steady clock
// goes on. If all ranks of a job are stopped for longer than their timeout, none of them is late. So
// a step between two readings counts as kMostStep at most. Waits read the clock several times as
// often. Each thread has a clock of its own: time points do not pass from one to another.
#pragma once

#include <algorithm>
#include <chrono>

namespace flux::host {

struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;
  static constexpr std::chrono::milliseconds kMostStep{250};  // as in flux/core/patience.py

  static time_point now() {
    thread_local auto last = std::chrono::steady_clock::now();
    thread_local time_point counted{last.time_since_epoch()};
    const auto real = std::chrono::steady_clock::now();
    counted += std::min<duration>(real - last, kMostStep);
    last = real;
    return counted;
  }
};

}  // namespace flux::host
