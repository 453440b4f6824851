// Wakes those that wait for words.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ficco::driver_double {

// Wakes those that wait for a value when a stream writes one. What the host writes they find out
// by looking, so a lost wake only costs a pause.
class Bell {
  public:
    static Bell& get() {
        static Bell& bell = *new Bell;
        return bell;
    }

    void ring() { changed_.notify_all(); }

    void pause(std::chrono::microseconds longest) {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, longest);
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
};

}  // namespace ficco::driver_double
