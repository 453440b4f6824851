// The contents of a cubin that the double reads: its kernels and their parameters.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace ficco::driver_double {

using Cubin = std::map<std::string, std::vector<Kernel::Parameter>>;  // by the kernel's name

bool is_cubin(const void* image);
// Throws Failure if it is not a cubin.
Cubin read_cubin(const void* image);

}  // namespace ficco::driver_double
