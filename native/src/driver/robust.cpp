// Robust, process-shared POSIX mutexes.
#include "ficco/robust.hpp"

#include <time.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ficco {

void RobustMutex::init() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    const int problem = pthread_mutex_init(&mutex_, &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (problem == 0) return;
    throw std::runtime_error(std::string("a mutex between processes cannot be made: ") +
                             std::strerror(problem));
}

RobustMutex::Got RobustMutex::judge(int result) noexcept {
    if (result == 0) return Got::yes;
    if (result != EOWNERDEAD) return Got::no;
    pthread_mutex_consistent(&mutex_);
    return Got::orphan;
}

RobustMutex::Got RobustMutex::try_lock() noexcept { return judge(pthread_mutex_trylock(&mutex_)); }

RobustMutex::Got RobustMutex::lock_for(std::int64_t ns) noexcept {
    // The only timed lock in every supported C library is the one by the time of day.
    timespec deadline{};
    clock_gettime(CLOCK_REALTIME, &deadline);
    const std::int64_t end = deadline.tv_nsec + ns;
    deadline.tv_sec += static_cast<time_t>(end / 1'000'000'000);
    deadline.tv_nsec = static_cast<long>(end % 1'000'000'000);
    return judge(pthread_mutex_timedlock(&mutex_, &deadline));
}

void RobustMutex::unlock() noexcept { pthread_mutex_unlock(&mutex_); }

}  // namespace ficco
