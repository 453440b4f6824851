// What the double reads of a cubin: its kernels, and the parameters that each of them takes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace ficco::driver_double {

using Cubin = std::map<std::string, std::vector<Kernel::Parameter>>;  // by the kernel's name

bool is_cubin(const void* image);
// Throws Failure where it is none.
Cubin read_cubin(const void* image);

}  // namespace ficco::driver_double
