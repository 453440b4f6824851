// One rank's GPU: the streams of its lanes, and their watchdog. It is independent of plans.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/gpu_watch.hpp"
#include "ficco/group.hpp"

namespace ficco {

class GpuRank {
  public:
    // The group tracks which ranks have failed or are present; its host windows are not used.
    GpuRank(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank);
    ~GpuRank();
    GpuRank(const GpuRank&) = delete;
    GpuRank& operator=(const GpuRank&) = delete;

    Gpu& gpu() const noexcept { return *gpu_; }
    Group& group() const noexcept { return *group_; }
    GpuWatch& watch() noexcept { return watch_; }
    int rank() const noexcept { return rank_; }

    // A lane's stream is created at the first request.
    GpuStream lane(int index);

    // Serializes calls on different streams of the caller. The device must be current.
    void after_last_call(GpuStream stream);
    void ended(GpuStream stream);
    // The same within a capture: serializes calls in branches of a graph.
    void after_last_call(GpuStream stream, std::uint64_t capture);
    void ended(GpuStream stream, std::uint64_t capture);

  private:
    const std::shared_ptr<Gpu> gpu_;
    const std::shared_ptr<Group> group_;
    const int rank_;
    std::mutex mutex_;  // guards lanes_
    std::vector<GpuStream> lanes_;
    GpuEvent ended_ = nullptr;  // the last call's end
    struct {
        std::uint64_t capture;
        GpuEvent ended;
    } captured_{};    // the last captured call
    GpuWatch watch_;  // last, so that it ends first
};

}  // namespace ficco
