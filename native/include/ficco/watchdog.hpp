// A thread that says, while it lives, that this process does, and notices when others have died or
// have begun another call than this one, or will not come to one that this rank has begun.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "ficco/control.hpp"
#include "ficco/futex.hpp"
#include "ficco/thread.hpp"

namespace ficco {

class Watchdog {
  public:
    // Returns when the rank is `here`; `control` outlives the watchdog.
    Watchdog(Control& control, int world, int rank);
    ~Watchdog();  // the rank has closed

  private:
    void loop() noexcept;
    void compare_calls() noexcept;
    void look_at_peers() noexcept;

    Control& control_;
    const int world_;
    const int rank_;
    std::array<std::uint32_t, kMaxWorld> compared_{};  // calls with each peer
    std::optional<Failure> difference_;                // told a while after it was found
    std::int64_t found_ns_ = 0;
    std::array<std::int64_t, kMaxWorld> absent_ns_{};  // since when each does not come, or 0
    Word arrived_{0};
    Word stop_{0};
    Thread thread_;  // last, as it uses all above
};

}  // namespace ficco
