// CLOCK_MONOTONIC and the timer slack of a thread, by Linux system calls.
#include "ficco/clock.hpp"

#include <sys/prctl.h>
#include <time.h>

#include <cerrno>

namespace ficco {

namespace {
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr unsigned long kSlackNs = 1000;
}  // namespace

std::int64_t now_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * kSecond + now.tv_nsec;
}

void sleep_until_ns(std::int64_t deadline_ns) noexcept {
    if (deadline_ns <= now_ns()) return;
    const PreciseSleep precise;
    timespec deadline{};
    deadline.tv_sec = static_cast<time_t>(deadline_ns / kSecond);
    deadline.tv_nsec = static_cast<long>(deadline_ns % kSecond);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
    }
}

PreciseSleep::PreciseSleep() noexcept {
    const int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    previous_slack_ns_ = slack > 0 ? static_cast<unsigned long>(slack) : 0;  // 0: the default
    prctl(PR_SET_TIMERSLACK, kSlackNs, 0, 0, 0);
}

PreciseSleep::~PreciseSleep() { prctl(PR_SET_TIMERSLACK, previous_slack_ns_, 0, 0, 0); }

}  // namespace ficco
