// Streams of lanes.
#include "ficco/gpu_rank.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace ficco {

GpuRank::GpuRank(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank)
    : gpu_(std::move(gpu)),
      group_(std::move(group)),
      rank_(rank),
      lanes_(kMaxLanes, nullptr),
      watch_(gpu_, group_, rank) {
    group_->check_own(rank);
}

GpuRank::~GpuRank() {
    try {
        const Gpu::Current current(*gpu_);
        for (const GpuStream stream : lanes_) {
            if (stream != nullptr) gpu_->delete_stream(stream);
        }
        for (const GpuEvent event : {ended_, captured_.ended}) {
            if (event != nullptr) gpu_->delete_event(event);
        }
    } catch (const GpuError&) {
        // the device is lost
    }
}

GpuStream GpuRank::lane(int index) {
    if (index < 0 || index >= kMaxLanes) {
        throw std::invalid_argument("lane is " + std::to_string(index) + ", not 0 to " +
                                    std::to_string(kMaxLanes - 1));
    }
    const std::lock_guard lock(mutex_);
    GpuStream& stream = lanes_[static_cast<std::size_t>(index)];
    if (stream == nullptr) {
        const Gpu::Current current(*gpu_);
        stream = gpu_->new_stream(false);
    }
    return stream;
}

void GpuRank::after_last_call(GpuStream stream) {
    if (ended_ != nullptr)
        gpu_->wait(stream, ended_);  // a handle may be that of another stream now
}

void GpuRank::ended(GpuStream stream) {
    if (ended_ == nullptr) ended_ = gpu_->new_event(false);
    gpu_->record(ended_, stream);
}

void GpuRank::after_last_call(GpuStream stream, std::uint64_t capture) {
    if (captured_.ended == nullptr || captured_.capture != capture) return;
    gpu_->wait(stream, captured_.ended);
}

void GpuRank::ended(GpuStream stream, std::uint64_t capture) {
    if (captured_.ended == nullptr) captured_.ended = gpu_->new_event(false);
    gpu_->record(captured_.ended, stream);
    captured_.capture = capture;
}

}  // namespace ficco
