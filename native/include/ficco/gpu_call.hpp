// One launch of a kernel that belongs to no program: enqueued by itself, as often as it is asked.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ficco/gpu_launch.hpp"

namespace ficco {

class GpuCall {
  public:
    // Loads the kernel, and holds its parameters against the driver's. Their places are in `slots`
    // slots: no own words, and no copies of a window. Throws std::invalid_argument.
    GpuCall(std::shared_ptr<Gpu> gpu, const LaunchBinding& binding, int slots);

    // Enqueues it, with an address and a pitch in bytes for every slot. Throws
    // std::invalid_argument where the kernel is not for such.
    void run(std::span<const GpuAddress> addresses, std::span<const std::int64_t> pitches,
             GpuStream stream);

  private:
    std::shared_ptr<Gpu> gpu_;
    GpuLaunch launch_;
    GpuTensorMaps maps_;
    std::size_t slots_;
};

}  // namespace ficco
