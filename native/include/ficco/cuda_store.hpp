// The only kernel of the native core itself, which stores words. See `Gpu::store`.
#pragma once

#include <span>

#include "ficco/cuda_api.hpp"
#include "ficco/gpu.hpp"

namespace ficco::cuda {

// Loads the kernel for a device, whose primary context is current, and keeps the context until the
// process ends, because the last use by a stream is unknown. The first call per device may wait for
// the device; later calls, while streams may wait, only return its result. Throws GpuError.
Function load_store_kernel(Device device);

// Launches the kernel with at most kMostStored writes.
void launch_store_kernel(Function kernel, std::span<const WordCommand> writes, Stream stream);

}  // namespace ficco::cuda
