// The one kernel that the native core brings itself: it stores words. See `Gpu::store`.
#pragma once

#include <span>

#include "ficco/cuda_api.hpp"
#include "ficco/gpu.hpp"

namespace ficco::cuda {

// Loads it for a device, whose primary context is current, and keeps that until the process ends:
// nobody can say when the last stream has used it. It may wait for the device. Once a device: a
// later call, behind which streams may wait, only tells what the first one found. Throws GpuError.
Function load_store_kernel(Device device);

// Launches it. `writes`: kMostStored at most.
void launch_store_kernel(Function kernel, std::span<const WordCommand> writes, Stream stream);

}  // namespace ficco::cuda
