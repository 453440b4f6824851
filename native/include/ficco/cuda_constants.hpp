// Words in a device's memory that hold a value until the process ends.
#pragma once

#include <cstdint>

#include "ficco/cuda_api.hpp"

namespace ficco::cuda {

// The address of a word of the device that holds the value. The word is allocated and written at
// the first request for the value, on a separate stream, and is never written again: graphs may
// hold its address. The device's primary context must be current. Other threads and streams may be
// in a capture. Throws GpuError if a driver call fails.
Pointer constant_word(Device device, std::uint32_t value);

}  // namespace ficco::cuda
