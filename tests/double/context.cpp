// Execution of work in a context, and its failure.
#include "context.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "faults.hpp"

namespace ficco::driver_double {

void Context::run(const Work& work) {
    if (over()) return;
    sleep(Faults::get().jitter());
    // Only what the bodies throw: the end of a thread (a host function may call Python, which ends
    // threads when it ends itself) passes through here as an exception, too.
    try {
        if (!over()) work.body(*this);
    } catch (const Failure& failure) {
        fail(failure.status);
    }
}

void Context::sleep(double seconds) const {
    using Clock = std::chrono::steady_clock;
    if (seconds <= 0) return;
    constexpr Clock::duration step = std::chrono::milliseconds(5);
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                     std::chrono::duration<double>(seconds));
    while (!over() && Clock::now() < end) {
        std::this_thread::sleep_until(std::min(end, Clock::now() + step));
    }
}

void Context::fail(Status status) {
    Status none = kSuccess;
    status_.compare_exchange_strong(none, status);
}

void Context::allow_peer(int other, bool allow) {
    const std::uint64_t bit = std::uint64_t{1} << other;
    if (allow) {
        peers_ |= bit;
    } else {
        peers_ &= ~bit;
    }
}

}  // namespace ficco::driver_double
