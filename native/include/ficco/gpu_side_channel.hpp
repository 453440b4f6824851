// Commands for a GPU whose streams may wait forever.
//
// Streams share hardware queues, and a command after a wait in a queue does not run before that
// wait ends. The device can be opened a second time, apart, with separate queues. It is opened when
// it is needed, and stays open.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"

namespace ficco {

// A device with a stream, which is destroyed with the last reference to the way.
struct GpuWay {
    explicit GpuWay(std::shared_ptr<Gpu> gpu);
    ~GpuWay();
    GpuWay(const GpuWay&) = delete;
    GpuWay& operator=(const GpuWay&) = delete;

    const std::shared_ptr<Gpu> gpu;
    GpuStream stream = nullptr;
};

class GpuSideChannel {
  public:
    // Enqueues commands on a stream of a device. It may be called for several ways, so the commands
    // must be idempotent.
    using Commands = std::function<void(Gpu&, GpuStream)>;

    // `probe` is a host word that the device can access, used only by the ways. A way that does not
    // complete a request within `answers_within_s` is abandoned; all requests end early when `stop`
    // is not 0.
    GpuSideChannel(std::shared_ptr<Gpu> gpu, GpuAddress probe, double answers_within_s,
                   const Word& stop);
    GpuSideChannel(const GpuSideChannel&) = delete;
    GpuSideChannel& operator=(const GpuSideChannel&) = delete;

    // Runs commands on the device and waits for them. Returns false if no way completes them; then
    // only probes are pending, unless a way has stopped responding in between. Throws GpuError if
    // the driver refuses a command.
    bool ask(const Commands& commands);
    // A way that responds now, or null.
    std::shared_ptr<const GpuWay> answering();
    // Why the last attempt to open the device apart failed; empty if it succeeded.
    const std::string& refusal() const noexcept { return refusal_; }

  private:
    using Way = std::shared_ptr<const GpuWay>;

    Way first(const std::function<bool(const GpuWay&)>& serves);
    Way apart();
    bool answers(const GpuWay& way);
    bool done(const GpuWay& way, const Commands& commands);
    bool finished(const GpuWay& way);
    bool stopped() const noexcept { return stop_.load(std::memory_order_acquire) != 0; }

    const GpuAddress probe_;
    const double answers_within_s_;
    const Word& stop_;
    const Way usual_;
    Way apart_;  // null if it is not open
    std::string refusal_;
    std::int64_t next_try_ns_ = 0;  // to open the device apart
};

}  // namespace ficco
