// Having a GPU do something even while its streams wait for ever.
//
// Streams share hardware queues, and a command that stands in a queue behind a wait is not done
// before that wait ends. The same device apart has queues of its own. It is opened when it is
// needed, and stays open.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"

namespace ficco {

// A device and a stream of it, which ends when nobody holds the way any more.
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
    // Enqueues on a stream of a device. It may be called for one way after another, so that its
    // commands must do no harm when they are done twice.
    using Commands = std::function<void(Gpu&, GpuStream)>;

    // `probe` is a word of the host that the device reaches, for the ways alone. A way that has not
    // done what it was asked for `answers_within_s` is left; all end early when `stop` is not 0.
    GpuSideChannel(std::shared_ptr<Gpu> gpu, GpuAddress probe, double answers_within_s,
                   const Word& stop);
    GpuSideChannel(const GpuSideChannel&) = delete;
    GpuSideChannel& operator=(const GpuSideChannel&) = delete;

    // Has the device do something and waits for it. False: it does not, by any way. Nothing but
    // probes then stands anywhere, unless a way has ceased to answer in between. Throws GpuError
    // where the driver refuses a command.
    bool ask(const Commands& commands);
    // A way that answers now. Null: none does.
    std::shared_ptr<const GpuWay> answering();
    // Why the device could not be opened apart when that was tried last; empty where it could.
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
    Way apart_;  // null where it is not open
    std::string refusal_;
    std::int64_t next_try_ns_ = 0;  // to open the device apart
};

}  // namespace ficco
