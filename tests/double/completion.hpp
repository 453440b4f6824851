// The end of one operation, which streams, events and calls wait for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace ficco::driver_double {

class Completion {
  public:
    void finish() {
        const std::lock_guard lock(mutex_);
        done_ = true;
        time_ns_ = std::chrono::steady_clock::now().time_since_epoch().count();
        changed_.notify_all();
    }

    bool done() const {
        const std::lock_guard lock(mutex_);
        return done_;
    }

    std::int64_t time_ns() const {  // of CLOCK_MONOTONIC
        const std::lock_guard lock(mutex_);
        return time_ns_;
    }

    void wait() const {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return done_; });
    }

    // Also ends if `over` becomes true, which it polls because that is not signaled.
    template <class Over>
    void wait_unless(Over over) const {
        std::unique_lock lock(mutex_);
        while (!done_ && !over()) changed_.wait_for(lock, std::chrono::milliseconds(2));
    }

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool done_ = false;
    std::int64_t time_ns_ = 0;
};

}  // namespace ficco::driver_double
