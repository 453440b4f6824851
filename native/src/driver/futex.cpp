// The futex system call. Callers decide how often to check again.
#include "ficco/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ficco {

// The _PRIVATE forms are faster but work only within one process; windows may be shared memory.

void futex_wait(const Word& word, std::uint32_t seen, std::int64_t deadline_ns) noexcept {
    timespec deadline{};
    deadline.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000);
    deadline.tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000);
    // Only this one of the two waits takes an absolute time.
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake_all(const Word& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ficco
