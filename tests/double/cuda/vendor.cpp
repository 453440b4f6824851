// The devices of NVIDIA: an H100.
#include "vendor.hpp"

namespace ficco::driver_double {

const Vendor kVendor{
    .version = 13000,
    .ready = false,
    .thread_slots = 132 * 2048,
    .least_priority = 0,
    .greatest_priority = -5,
};

}  // namespace ficco::driver_double
