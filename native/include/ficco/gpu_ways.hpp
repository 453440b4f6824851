// Having a GPU do something even while its streams wait for ever.
//
// Streams share hardware queues, and a command that stands in a queue behind a wait is not done
// before that wait ends. The same device apart has queues of its own. That takes memory of the
// device, so it is opened when it is needed, and given back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"

namespace ficco {

class GpuWays {
  public:
    // Enqueues on a stream of a device. It may be called for one way after another, so that its
    // commands must do no harm when they are done twice.
    using Commands = std::function<void(Gpu&, GpuStream)>;

    // `probe` is a word of the host that the device reaches, for the ways alone. A way that has not
    // done what it was asked for `answers_within_s` is left; all end early when `stop` is not 0.
    GpuWays(std::shared_ptr<Gpu> gpu, GpuAddress probe, double answers_within_s, const Word& stop);
    ~GpuWays();
    GpuWays(const GpuWays&) = delete;
    GpuWays& operator=(const GpuWays&) = delete;

    // Has the device do something and waits for it. False: it does not, by any way. Nothing but
    // probes then stands anywhere, unless a way has ceased to answer in between. Throws GpuError
    // where the driver refuses a command.
    bool ask(const Commands& commands);
    // Why the device could not be opened apart when that was tried last; empty where it could.
    const std::string& refusal() const noexcept { return refusal_; }

    // Ends the device apart if it is open: at once, or where nothing was asked of it for a second.
    void give_back() noexcept;
    void give_back_unused() noexcept;

  private:
    struct Way {
        std::shared_ptr<Gpu> gpu;
        GpuStream stream;
    };

    Way* apart();
    bool answers(const Way& way);
    bool done(const Way& way, const Commands& commands);
    bool finished(const Way& way);
    bool stopped() const noexcept { return stop_.load(std::memory_order_acquire) != 0; }

    const GpuAddress probe_;
    const double answers_within_s_;
    const Word& stop_;
    Way usual_;
    std::optional<Way> apart_;
    std::string refusal_;
    std::int64_t next_try_ns_ = 0;  // to open the device apart
    std::int64_t used_ns_ = 0;      // the device apart
};

}  // namespace ficco
