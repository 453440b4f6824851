// The one clock of the native core, and sleeping by it. No waiting for events: see futex.hpp.
#pragma once

#include <cstdint>

namespace ficco {

// CLOCK_MONOTONIC, so that times of several processes and of Python can be compared.
std::int64_t now_ns() noexcept;

// Returns at once where `deadline_ns` is past.
void sleep_until_ns(std::int64_t deadline_ns) noexcept;

// While one lives, timed sleeps of this thread end within 1 us of their time as far as the kernel
// is concerned (by default it may add 50 us to save power).
class PreciseSleep {
  public:
    PreciseSleep() noexcept;
    ~PreciseSleep();
    PreciseSleep(const PreciseSleep&) = delete;
    PreciseSleep& operator=(const PreciseSleep&) = delete;

  private:
    unsigned long previous_slack_ns_;
};

}  // namespace ficco
