// The multiprocessors (compute units) of all devices: whether one kernel has all thread slots of a
// device, so that no other kernel begins.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "context.hpp"

namespace ficco::driver_double {

class Multiprocessors {
  public:
    static Multiprocessors& get() {
        static Multiprocessors& multiprocessors = *new Multiprocessors;
        return multiprocessors;
    }

    void hold(int device, bool held) {
        const std::lock_guard lock(mutex_);
        held_[device] = held;
        changed_.notify_all();
    }

    // Returns when there is room, or the context is over.
    void wait(int device, const Context& context) {
        std::unique_lock lock(mutex_);
        while (held_[device] && !context.over()) changed_.wait_for(lock, kLook);
    }

  private:
    static constexpr std::chrono::microseconds kLook{400};

    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<int, bool> held_;
};

}  // namespace ficco::driver_double
