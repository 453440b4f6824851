// The interface: streams, events, memory operations and host functions.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "calls.hpp"
#include "vendor.hpp"

using namespace ficco::driver_double;

namespace {

constexpr unsigned kMostOperations = 256;

// Enqueues a memory operation that is given as arguments.
void enqueue_word(Driver& driver, StreamHandle handle, int operation, Address address,
                  std::uint32_t value, unsigned flags) {
    MemOp entry{};
    entry.word = {operation, address, value, flags, 0};
    const auto stream = driver.stream(handle);
    driver.submit(*stream, memory_operations(*stream->context, {entry}));
}

void get_stream_context(Driver& driver, StreamHandle stream, ContextHandle* context) {
    out(context) = driver.stream(stream)->context->handle;
}

}  // namespace

DOUBLE_API Status cuStreamCreate(StreamHandle* stream, unsigned flags) {
    return call("cuStreamCreate",
                [&](Driver& driver, Lock&) { create_stream(driver, stream, flags, 0); });
}

DOUBLE_API Status cuStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int priority) {
    return call("cuStreamCreateWithPriority", [&](Driver& driver, Lock&) {
        create_stream(driver, stream, flags,
                      std::clamp(priority, kVendor.greatest_priority, kVendor.least_priority));
    });
}

DOUBLE_API Status cuStreamDestroy(StreamHandle stream) {
    return call("cuStreamDestroy", [&](Driver& driver, Lock&) { driver.destroy_stream(stream); });
}
DOUBLE_ALIAS(cuStreamDestroy_v2, cuStreamDestroy);

DOUBLE_API Status cuStreamGetPriority(StreamHandle stream, int* priority) {
    return call("cuStreamGetPriority",
                [&](Driver& driver, Lock&) { out(priority) = driver.stream(stream)->priority; });
}

DOUBLE_API Status cuStreamGetFlags(StreamHandle stream, unsigned* flags) {
    return call("cuStreamGetFlags",
                [&](Driver& driver, Lock&) { out(flags) = driver.stream(stream)->flags; });
}

DOUBLE_API Status cuStreamGetDevice(StreamHandle stream, int* device) {
    return call("cuStreamGetDevice", [&](Driver& driver, Lock&) {
        out(device) = driver.stream(stream)->context->device;
    });
}

DOUBLE_API Status cuStreamGetCtx(StreamHandle stream, ContextHandle* context) {
    return call("cuStreamGetCtx",
                [&](Driver& driver, Lock&) { get_stream_context(driver, stream, context); });
}

DOUBLE_API Status cuStreamGetCtx_v2(StreamHandle stream, ContextHandle* context, Handle* green) {
    return call("cuStreamGetCtx", [&](Driver& driver, Lock&) {
        get_stream_context(driver, stream, context);
        if (green != nullptr) *green = nullptr;
    });
}

DOUBLE_API Status cuStreamQuery(StreamHandle handle) {
    return call("cuStreamQuery", [&](Driver& driver, Lock&) { return query(driver, handle); });
}

DOUBLE_API Status cuStreamSynchronize(StreamHandle handle) {
    return call("cuStreamSynchronize",
                [&](Driver& driver, Lock& lock) { return synchronize(driver, lock, handle); });
}

DOUBLE_API Status cuStreamWaitEvent(StreamHandle stream_handle, EventHandle event_handle,
                                    unsigned flags) {
    return call("cuStreamWaitEvent", [&](Driver& driver, Lock&) {
        wait_for_event(driver, stream_handle, event_handle, flags);
    });
}

DOUBLE_API Status cuEventCreate(EventHandle* event, unsigned flags) {
    return call("cuEventCreate",
                [&](Driver& driver, Lock&) { create_event(driver, event, flags); });
}

DOUBLE_API Status cuEventDestroy(EventHandle event) {
    return call("cuEventDestroy", [&](Driver& driver, Lock&) { driver.events.take(event); });
}
DOUBLE_ALIAS(cuEventDestroy_v2, cuEventDestroy);

DOUBLE_API Status cuEventRecord(EventHandle event, StreamHandle stream) {
    return call("cuEventRecord", [&](Driver& driver, Lock&) { record(driver, event, stream, 0); });
}

DOUBLE_API Status cuEventRecordWithFlags(EventHandle event, StreamHandle stream, unsigned flags) {
    return call("cuEventRecordWithFlags",
                [&](Driver& driver, Lock&) { record(driver, event, stream, flags); });
}

DOUBLE_API Status cuEventQuery(EventHandle handle) {
    return call("cuEventQuery", [&](Driver& driver, Lock&) { return query_event(driver, handle); });
}

DOUBLE_API Status cuEventSynchronize(EventHandle handle) {
    return call("cuEventSynchronize", [&](Driver& driver, Lock& lock) {
        return synchronize_event(driver, lock, handle);
    });
}

DOUBLE_API Status cuEventElapsedTime(float* milliseconds, EventHandle start, EventHandle end) {
    return call("cuEventElapsedTime",
                [&](Driver& driver, Lock&) { return elapsed(driver, milliseconds, start, end); });
}
DOUBLE_ALIAS(cuEventElapsedTime_v2, cuEventElapsedTime);

DOUBLE_API Status cuStreamWriteValue32(StreamHandle stream, Address address, std::uint32_t value,
                                       unsigned flags) {
    return call("cuStreamWriteValue32", [&](Driver& driver, Lock&) {
        enqueue_word(driver, stream, kOpWriteValue32, address, value, flags);
    });
}
DOUBLE_ALIAS(cuStreamWriteValue32_v2, cuStreamWriteValue32);

DOUBLE_API Status cuStreamWaitValue32(StreamHandle stream, Address address, std::uint32_t value,
                                      unsigned flags) {
    return call("cuStreamWaitValue32", [&](Driver& driver, Lock&) {
        enqueue_word(driver, stream, kOpWaitValue32, address, value, flags);
    });
}
DOUBLE_ALIAS(cuStreamWaitValue32_v2, cuStreamWaitValue32);

DOUBLE_API Status cuStreamBatchMemOp(StreamHandle handle, unsigned count, MemOp* operations,
                                     unsigned flags) {
    return call("cuStreamBatchMemOp", [&](Driver& driver, Lock&) {
        const auto stream = driver.stream(handle);
        if (flags != 0 || count > kMostOperations) throw Failure{kInvalidValue};
        if (count == 0) return;
        const MemOp* begin = &out(operations);
        driver.submit(*stream, memory_operations(*stream->context, {begin, begin + count}));
    });
}
DOUBLE_ALIAS(cuStreamBatchMemOp_v2, cuStreamBatchMemOp);

DOUBLE_API Status cuLaunchHostFunc(StreamHandle stream, HostFunction function, void* data) {
    return call("cuLaunchHostFunc", [&](Driver& driver, Lock&) {
        driver.submit(*driver.stream(stream), host_function(function, data));
    });
}
