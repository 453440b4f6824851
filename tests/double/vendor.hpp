// What differs between the devices of vendors. Each vendor's library defines its own.
#pragma once

namespace ficco::driver_double {

struct Vendor {
    int version;            // of the driver, unless the environment says otherwise
    bool ready;             // without a call that initializes the driver
    unsigned thread_slots;  // of a device
    int least_priority, greatest_priority;
};
extern const Vendor kVendor;

}  // namespace ficco::driver_double
