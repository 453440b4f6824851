// Words in a device's memory that hold a value until the process ends.
#pragma once

#include <cstdint>

#include "ficco/gpu.hpp"

namespace ficco::hip {

// The address of a word of the device that holds the value. The word is allocated and written at
// the first request for the value, on a separate stream, and is never written again: graphs may
// hold its address. The device must be current. Other threads and streams may be in a capture.
// Throws GpuError if a call fails.
GpuAddress constant_word(int device, std::uint32_t value);

}  // namespace ficco::hip
