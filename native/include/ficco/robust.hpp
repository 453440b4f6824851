// A mutex in memory that processes share; its holder may be killed. Its users define the protected
// state, and repair that after a death.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace ficco {

// Plain memory: init() initializes it in place, once. It is never destroyed, because its last user
// is unknown.
class RobustMutex {
  public:
    // `orphan`: it is locked now, and its previous holder died while it held it.
    enum class Got { yes, no, orphan };

    void init();  // throws std::runtime_error

    Got try_lock() noexcept;
    Got lock_for(std::int64_t ns) noexcept;  // waits at most about `ns`
    void unlock() noexcept;

  private:
    Got judge(int result) noexcept;

    pthread_mutex_t mutex_;
};

}  // namespace ficco
