// The loop of a watchdog. Heartbeats and deaths are implemented in control.cpp.
#include "ficco/watchdog.hpp"

#include <string>

#include "ficco/clock.hpp"

namespace ficco {

namespace {
constexpr std::int64_t kBeatNs = 50'000'000;
// Calls before the different one may still run; this delay lets them complete.
constexpr std::int64_t kReportedAfterNs = 500'000'000;
// Later than a wait for a rank that has left gives up (kLeftGraceS), whose report is more specific.
constexpr std::int64_t kMissedAfterNs = 1'200'000'000;
}  // namespace

Watchdog::Watchdog(Control& control, int world, int rank)
    : control_(control),
      world_(world),
      rank_(rank),
      thread_("ficco r" + std::to_string(rank) + " dog", [this] { loop(); }) {
    while (arrived_.load(std::memory_order_acquire) == 0) {
        futex_wait(arrived_, 0, now_ns() + kBeatNs);
    }
}

Watchdog::~Watchdog() {
    stop_.store(1, std::memory_order_release);
    futex_wake_all(stop_);
    thread_.join();
}

void Watchdog::loop() noexcept {
    control_.arrive(rank_);
    arrived_.store(1, std::memory_order_release);
    futex_wake_all(arrived_);
    while (stop_.load(std::memory_order_acquire) == 0) {
        control_.beat(rank_);
        control_.look_for_deaths(world_);
        compare_calls();
        look_at_peers();
        futex_wait(stop_, 0, now_ns() + kBeatNs);
    }
    control_.depart(rank_);
}

void Watchdog::compare_calls() noexcept {
    for (int peer = 0; peer < rank_ && !difference_; ++peer) {
        difference_ = control_.difference(rank_, peer, compared_[static_cast<std::size_t>(peer)]);
        found_ns_ = now_ns();
    }
    if (difference_ && now_ns() - found_ns_ > kReportedAfterNs) control_.fail(*difference_);
}

// A peer that refuses a call may still make it, and calls that do not need a departed peer may
// still end. So the group fails only after a peer has been absent for some time.
void Watchdog::look_at_peers() noexcept {
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        std::int64_t& since = absent_ns_[static_cast<std::size_t>(peer)];
        auto failure = control_.missed(rank_, peer);
        const std::int64_t after_ns = failure ? kMissedAfterNs : kReportedAfterNs;
        if (!failure) failure = control_.refused(rank_, peer, false);
        if (!failure) {
            since = 0;
        } else if (since == 0) {
            since = now_ns();
        } else if (now_ns() - since > after_ns) {
            control_.fail(*failure);
        }
    }
}

}  // namespace ficco
