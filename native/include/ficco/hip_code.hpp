// Code objects of AMD: ELF files with compiled kernels, loaded from memory.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ficco/hip_api.hpp"

namespace ficco::hip {

// The bytes of each parameter of a kernel, in order, as the metadata of its code object say;
// without those that HIP fills in itself. Throws GpuError if the code object does not tell them.
std::vector<std::size_t> parameter_sizes(std::string_view code, const std::string& entry);

// Loads a kernel of a code object to the current device. It is kept until the process ends. It may
// wait for the device. Throws GpuError.
Kernel load_code(std::string_view code, const std::string& entry);

// The parameter sizes of a kernel that `load_code` has loaded. Throws GpuError for others, because
// HIP has no function that tells them.
std::vector<std::size_t> parameters_of(Kernel kernel);

}  // namespace ficco::hip
