// Finds a way by which a GPU responds.
#include "ficco/gpu_side_channel.hpp"

#include <array>
#include <utility>

#include "ficco/clock.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kIdleLookNs = 200'000;
constexpr std::int64_t kTryAgainNs = 1'000'000'000;

}  // namespace

GpuWay::GpuWay(std::shared_ptr<Gpu> opened) : gpu(std::move(opened)) {
    const Gpu::Current current(*gpu);
    stream = gpu->new_stream(true);
}

GpuWay::~GpuWay() {
    try {
        const Gpu::Current current(*gpu);
        gpu->delete_stream(stream);
    } catch (const GpuError&) {
        // the device and its memory are lost
    }
}

GpuSideChannel::GpuSideChannel(std::shared_ptr<Gpu> gpu, GpuAddress probe, double answers_within_s,
                               const Word& stop)
    : probe_(probe),
      answers_within_s_(answers_within_s),
      stop_(stop),
      usual_(std::make_shared<GpuWay>(std::move(gpu))) {}

// The first way that responds and for which `serves` is true.
GpuSideChannel::Way GpuSideChannel::first(const std::function<bool(const GpuWay&)>& serves) {
    // With one queue, a thread that has filled it may block others that add to it: then the usual
    // way is tried last.
    const bool last = usual_->gpu->one_queue();
    for (const bool usual : {!last, last}) {
        const Way way = usual ? usual_ : apart();
        if (way && !stopped() && answers(*way) && serves(*way)) return way;
    }
    return nullptr;
}

bool GpuSideChannel::ask(const Commands& commands) {
    return first([&](const GpuWay& way) { return done(way, commands); }) != nullptr;
}

std::shared_ptr<const GpuWay> GpuSideChannel::answering() {
    return first([](const GpuWay&) { return true; });
}

// Null if it cannot be opened.
GpuSideChannel::Way GpuSideChannel::apart() {
    if (apart_) return apart_;
    if (stopped() || now_ns() < next_try_ns_) return nullptr;
    if (!usual_->gpu->facts().apart) {
        refusal_ = "the driver opens a device once";
        return nullptr;
    }
    try {
        apart_ = std::make_shared<GpuWay>(usual_->gpu->apart());
        refusal_.clear();
        return apart_;
    } catch (const GpuError& error) {
        refusal_ = error.what();
        next_try_ns_ = now_ns() + kTryAgainNs;
        return nullptr;
    }
}

// A way that does not respond would run commands much later, when their target memory may have
// another owner. So only a probe is pending there.
bool GpuSideChannel::answers(const GpuWay& way) {
    {
        const Gpu::Current current(*way.gpu);
        if (!way.gpu->idle(way.stream)) return false;
    }
    return done(way, [&](Gpu& gpu, GpuStream stream) {
        gpu.words(std::array{WordCommand{WordCommand::Kind::write, probe_, 1U}}, stream);
    });
}

// Whether a way has completed its commands in time.
bool GpuSideChannel::done(const GpuWay& way, const Commands& commands) {
    const Gpu::Current current(*way.gpu);
    try {
        commands(*way.gpu, way.stream);
    } catch (const GpuError&) {
        finished(way);  // earlier commands may use memory that is freed afterwards
        throw;
    }
    return finished(way);
}

bool GpuSideChannel::finished(const GpuWay& way) {
    const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(answers_within_s_ * 1e9);
    while (!way.gpu->idle(way.stream)) {
        if (now_ns() > deadline || stopped()) return false;
        sleep_until_ns(now_ns() + kIdleLookNs);
    }
    return true;
}

}  // namespace ficco
