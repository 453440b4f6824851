// A thread that sends heartbeats of this process. It detects peers that have died, that have begun
// a different call, or that will not make a call that this rank has begun.
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
    // Returns when the rank is `here`; `control` must outlive the watchdog.
    Watchdog(Control& control, int world, int rank);
    ~Watchdog();  // marks the rank as closed

  private:
    void loop() noexcept;
    void compare_calls() noexcept;
    void look_at_peers() noexcept;

    Control& control_;
    const int world_;
    const int rank_;
    std::array<std::uint32_t, kMaxWorld> compared_{};  // number of compared calls, by peer
    std::optional<Failure> difference_;                // reported some time after it was found
    std::int64_t found_ns_ = 0;
    std::array<std::int64_t, kMaxWorld> absent_ns_{};  // by peer: absent since, or 0
    Word arrived_{0};
    Word stop_{0};
    Thread thread_;  // last, as it uses all above
};

}  // namespace ficco
