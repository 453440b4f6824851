// The declaration of functions of the interface, and their common code around the body.
#pragma once

#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <type_traits>

#include "abi.hpp"
#include "driver.hpp"
#include "faults.hpp"

#define DOUBLE_API extern "C" __attribute__((visibility("default")))
// A second name of a function above.
#define DOUBLE_ALIAS(other, function) \
    DOUBLE_API decltype(function) other __attribute__((alias(#function)))

namespace ficco::driver_double {

// Runs the body with the driver, whose mutex is held until `lock` is unlocked. The body returns a
// status or nothing; it throws Failure. `function` is the name by which faults are set.
template <class Body>
Status call(const char* function, Body body) {
    if (const std::optional<Status> fault = Faults::get().take(function)) return *fault;
    Faults::get().wait_while_held(function);
    try {
        Driver& driver = Driver::get();
        if (!driver.ready) return kNotInitialized;
        std::unique_lock lock(driver.mutex);
        if constexpr (std::is_void_v<decltype(body(driver, lock))>) {
            body(driver, lock);
            return kSuccess;
        } else {
            return body(driver, lock);
        }
    } catch (const Failure& failure) {
        return failure.status;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    } catch (const std::exception&) {
        return kOperatingSystem;
    }
}

using Lock = std::unique_lock<std::mutex>;

// A pointer argument for a call's result.
template <class Value>
Value& out(Value* place) {
    if (place == nullptr) throw Failure{kInvalidValue};
    return *place;
}

}  // namespace ficco::driver_double
