// The interface: streams, events and host functions.
#include <algorithm>

#include "hip_call.hpp"
#include "vendor.hpp"

using namespace ficco::driver_double;

DOUBLE_API Status hipStreamCreate(StreamHandle* stream) {
    return hip_call("hipStreamCreate",
                    [&](Driver& driver, Lock&) { create_stream(driver, stream, 0, 0); });
}

DOUBLE_API Status hipStreamCreateWithFlags(StreamHandle* stream, unsigned flags) {
    return hip_call("hipStreamCreateWithFlags",
                    [&](Driver& driver, Lock&) { create_stream(driver, stream, flags, 0); });
}

DOUBLE_API Status hipStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int priority) {
    return hip_call("hipStreamCreateWithPriority", [&](Driver& driver, Lock&) {
        create_stream(driver, stream, flags,
                      std::clamp(priority, kVendor.greatest_priority, kVendor.least_priority));
    });
}

DOUBLE_API Status hipStreamDestroy(StreamHandle stream) {
    return hip_call("hipStreamDestroy",
                    [&](Driver& driver, Lock&) { driver.destroy_stream(stream); });
}

DOUBLE_API Status hipStreamGetPriority(StreamHandle stream, int* priority) {
    return hip_call("hipStreamGetPriority", [&](Driver& driver, Lock&) {
        out(priority) = driver.stream(stream)->priority;
    });
}

DOUBLE_API Status hipStreamQuery(StreamHandle stream) {
    return hip_call_on(stream, "hipStreamQuery",
                       [&](Driver& driver, Lock&) { return query(driver, stream); });
}

DOUBLE_API Status hipStreamSynchronize(StreamHandle stream) {
    const SyncLocks::Held held(stream);
    return hip_call("hipStreamSynchronize",
                    [&](Driver& driver, Lock& lock) { return synchronize(driver, lock, stream); });
}

DOUBLE_API Status hipStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
    return hip_call_on(stream, "hipStreamWaitEvent", [&](Driver& driver, Lock&) {
        wait_for_event(driver, stream, event, flags);
    });
}

DOUBLE_API Status hipEventCreate(EventHandle* event) {
    return hip_call("hipEventCreate",
                    [&](Driver& driver, Lock&) { create_event(driver, event, 0); });
}

DOUBLE_API Status hipEventCreateWithFlags(EventHandle* event, unsigned flags) {
    return hip_call("hipEventCreateWithFlags",
                    [&](Driver& driver, Lock&) { create_event(driver, event, flags); });
}

DOUBLE_API Status hipEventDestroy(EventHandle event) {
    return hip_call("hipEventDestroy", [&](Driver& driver, Lock&) { driver.events.take(event); });
}

DOUBLE_API Status hipEventRecord(EventHandle event, StreamHandle stream) {
    return hip_call_on(stream, "hipEventRecord",
                       [&](Driver& driver, Lock&) { record(driver, event, stream, 0); });
}

DOUBLE_API Status hipEventQuery(EventHandle event) {
    return hip_call("hipEventQuery",
                    [&](Driver& driver, Lock&) { return query_event(driver, event); });
}

DOUBLE_API Status hipEventSynchronize(EventHandle event) {
    return hip_call("hipEventSynchronize", [&](Driver& driver, Lock& lock) {
        return synchronize_event(driver, lock, event);
    });
}

DOUBLE_API Status hipEventElapsedTime(float* milliseconds, EventHandle start, EventHandle end) {
    return hip_call("hipEventElapsedTime", [&](Driver& driver, Lock&) {
        return elapsed(driver, milliseconds, start, end);
    });
}

DOUBLE_API Status hipLaunchHostFunc(StreamHandle stream, HostFunction function, void* data) {
    return hip_call_on(stream, "hipLaunchHostFunc", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, host_function(function, data));
    });
}
