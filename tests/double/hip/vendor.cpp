// The devices of AMD: an MI300X.
#include "vendor.hpp"

namespace ficco::driver_double {

const Vendor kVendor{
    .version = 70125424,  // HIP 7.1
    .ready = true,        // HIP initializes itself
    .thread_slots = 304 * 2048,
    .least_priority = 1,
    .greatest_priority = -1,
};

}  // namespace ficco::driver_double
