// Compiled kernels (cubins, or PTX), loaded to a device from memory.
#pragma once

#include <string>
#include <string_view>

#include "ficco/cuda_api.hpp"

namespace ficco::cuda {

// Loads a kernel of a cubin, or of PTX, for a device, whose primary context is current. Keeps both
// until the process ends, because the last use by a graph is unknown. It may wait for the device.
// `shared_bytes`: dynamic shared memory of its launches. Throws GpuError.
Function load_code(Device device, std::string_view code, const std::string& entry,
                   unsigned shared_bytes);

}  // namespace ficco::cuda
