// The clock of the native core, and sleeps by it. Waits for events are in futex.hpp.
#pragma once

#include <cstdint>

namespace ficco {

// CLOCK_MONOTONIC, so that times of several processes and of Python can be compared.
std::int64_t now_ns() noexcept;

// Returns immediately if `deadline_ns` is in the past.
void sleep_until_ns(std::int64_t deadline_ns) noexcept;

// During its lifetime, the kernel ends timed sleeps of this thread within 1 us of their deadline
// (by default it may add 50 us to save power).
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
