// The common code of HIP's functions: a current device for each thread, and its last error.
#pragma once

#include "calls.hpp"
#include "sync_locks.hpp"

namespace ficco::driver_double {

inline constexpr Status kNoDevice = 100;
inline constexpr Status kInvalidCopyDirection = 21;

// Makes a device current on the thread, whose primary context lives from now on.
void use_device(Driver& driver, int device);

// The error that a thread's calls have left: that of HIP 7, which neither a success nor "not ready"
// replaces.
Status& last_error();

template <class Body>
Status hip_call(const char* function, Body body) {
    const Status status = call(function, [&](Driver& driver, Lock& lock) {
        if (driver.device_count() == 0) throw Failure{kNoDevice};
        if (Driver::thread_contexts().empty()) use_device(driver, 0);
        if constexpr (std::is_void_v<decltype(body(driver, lock))>) {
            body(driver, lock);
            return kSuccess;
        } else {
            return static_cast<Status>(body(driver, lock));
        }
    });
    if (status != kSuccess && status != kNotReady) last_error() = status;
    return status;
}

// A call on a stream, which may be locked.
template <class Body>
Status hip_call_on(StreamHandle stream, const char* function, Body body) {
    SyncLocks::get().pass(stream);
    return hip_call(function, body);
}

}  // namespace ficco::driver_double
