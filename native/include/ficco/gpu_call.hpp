// A single launch of a kernel outside programs, which can be repeated.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ficco/gpu_launch.hpp"

namespace ficco {

class GpuCall {
  public:
    // Loads the kernel and compares its parameters with the driver's. Their places are in `slots`
    // slots, without own words and window copies. Throws std::invalid_argument.
    GpuCall(std::shared_ptr<Gpu> gpu, const LaunchBinding& binding, int slots);

    // Enqueues the launch with an address and a pitch in bytes for every slot. Throws
    // std::invalid_argument if the kernel was not compiled for them.
    void run(std::span<const GpuAddress> addresses, std::span<const std::int64_t> pitches,
             GpuStream stream);

  private:
    std::shared_ptr<Gpu> gpu_;
    GpuLaunch launch_;
    GpuTensorMaps maps_;
    std::size_t slots_;
};

}  // namespace ficco
