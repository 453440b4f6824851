// A mutex in memory that processes share, whose holder may be killed. What it protects, and how
// that is mended after a death, is its users' matter.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace ficco {

// Plain memory: it is made by init() where it lies, once, and never ended, as nobody knows who is
// the last to look at it.
class RobustMutex {
  public:
    // `orphan`: it is held now, and its last holder died while it held it.
    enum class Got { yes, no, orphan };

    void init();  // throws std::runtime_error

    Got try_lock() noexcept;
    Got lock_for(std::int64_t ns) noexcept;  // waits about that long at most
    void unlock() noexcept;

  private:
    Got judge(int result) noexcept;

    pthread_mutex_t mutex_;
};

}  // namespace ficco
