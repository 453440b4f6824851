// The interface: streams, events, memory operations and host functions.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "call.hpp"
#include "work.hpp"

using namespace ficco::driver_double;

namespace {

constexpr unsigned kMostOperations = 256;
constexpr unsigned kMostEventFlags = 7;

void create_stream(Driver& driver, StreamHandle* stream, unsigned flags, int priority) {
    out(stream) = driver.make_stream(flags, priority)->handle;
}

// Enqueues a memory operation that is given as arguments.
void enqueue_word(Driver& driver, StreamHandle handle, int operation, Address address,
                  std::uint32_t value, unsigned flags) {
    MemOp entry{};
    entry.word = {operation, address, value, flags, 0};
    const auto stream = driver.stream(handle);
    driver.submit(*stream, memory_operations(*stream->context, {entry}));
}

std::string name_of(EventHandle event) {
    return std::to_string(reinterpret_cast<std::uintptr_t>(event));
}

void record(Driver& driver, EventHandle event_handle, StreamHandle stream_handle, unsigned flags) {
    const auto stream = driver.stream(stream_handle);
    const auto event = driver.event(event_handle);
    if (event->context != stream->context) throw Failure{kInvalidHandle};
    if ((flags & ~kEventExternal) != 0) throw Failure{kInvalidValue};
    if (!stream->capture) {
        if ((flags & kEventExternal) != 0) throw Failure{kIllegalState};
        Work recorded = mark();
        recorded.log_line = "record " + name_of(event_handle);
        event->last = driver.submit(*stream, std::move(recorded));
        event->capture = nullptr;
    } else if ((flags & kEventExternal) != 0) {
        driver.submit(*stream, external_record(event));
    } else {
        driver.captures.record(*stream, *event);
    }
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
                      std::clamp(priority, kGreatestPriority, kLeastPriority));
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
    return call("cuStreamQuery", [&](Driver& driver, Lock&) {
        const auto stream = driver.stream(handle);
        driver.captures.refuse_stream(*stream);
        return !stream->last || stream->last->done() ? kSuccess : kNotReady;
    });
}

DOUBLE_API Status cuStreamSynchronize(StreamHandle handle) {
    return call("cuStreamSynchronize", [&](Driver& driver, Lock& lock) {
        const auto stream = driver.stream(handle);
        driver.captures.refuse_stream(*stream);
        const auto last = stream->last;
        lock.unlock();
        if (last) last->wait();
        return stream->context->status();
    });
}

DOUBLE_API Status cuStreamWaitEvent(StreamHandle stream_handle, EventHandle event_handle,
                                    unsigned flags) {
    return call("cuStreamWaitEvent", [&](Driver& driver, Lock&) {
        const auto stream = driver.stream(stream_handle);
        const auto event = driver.event(event_handle);
        if ((flags & ~kEventExternal) != 0) throw Failure{kInvalidValue};
        if ((flags & kEventExternal) != 0) {
            if (!stream->capture) throw Failure{kIllegalState};
            driver.submit(*stream, external_wait(event));
        } else if (stream->capture || event->capture) {
            driver.captures.wait(stream, *event);
        } else if (event->last) {
            Work awaited = wait_for(event->last);
            awaited.log_line = "await " + name_of(event_handle);
            driver.submit(*stream, std::move(awaited));
        }
    });
}

DOUBLE_API Status cuEventCreate(EventHandle* event, unsigned flags) {
    return call("cuEventCreate", [&](Driver& driver, Lock&) {
        const auto context = driver.current();
        if (flags > kMostEventFlags) throw Failure{kInvalidValue};
        auto made = std::make_shared<Event>(Event{new_handle(), context, flags, nullptr, {}, {}});
        out(event) = made->handle;
        driver.events.add(std::move(made));
    });
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
    return call("cuEventQuery", [&](Driver& driver, Lock&) {
        const auto event = driver.event(handle);
        driver.captures.refuse_event(*event);
        driver.captures.refuse_unsafe();
        return !event->last || event->last->done() ? kSuccess : kNotReady;
    });
}

DOUBLE_API Status cuEventSynchronize(EventHandle handle) {
    return call("cuEventSynchronize", [&](Driver& driver, Lock& lock) {
        const auto event = driver.event(handle);
        driver.captures.refuse_event(*event);
        driver.captures.refuse_unsafe();
        const auto last = event->last;
        lock.unlock();
        if (last) last->wait();
        return event->context->status();
    });
}

DOUBLE_API Status cuEventElapsedTime(float* milliseconds, EventHandle start, EventHandle end) {
    return call("cuEventElapsedTime", [&](Driver& driver, Lock&) {
        const auto from = driver.event(start);
        const auto to = driver.event(end);
        driver.captures.refuse_event(*from);
        driver.captures.refuse_event(*to);
        if (from->context != to->context ||
            ((from->flags | to->flags) & kEventDisableTiming) != 0) {
            throw Failure{kInvalidHandle};
        }
        if (!from->last || !to->last) throw Failure{kInvalidHandle};
        if (!from->last->done() || !to->last->done()) return kNotReady;
        out(milliseconds) =
            static_cast<float>(to->last->time_ns() - from->last->time_ns()) / 1'000'000.0F;
        return kSuccess;
    });
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

// Makes the context of the stream fail with the status when the stream has done what was enqueued
// before, as a kernel may that touches what it must not.
DOUBLE_API Status ficcoDoubleFailStream(StreamHandle stream, Status status) {
    return call("ficcoDoubleFailStream", [&](Driver& driver, Lock&) {
        driver.submit(*driver.stream(stream), fail(status));
    });
}

// Makes the stream idle for that long after its earlier work.
DOUBLE_API Status ficcoDoubleStallStream(StreamHandle stream, double seconds) {
    return call("ficcoDoubleStallStream", [&](Driver& driver, Lock&) {
        driver.submit(*driver.stream(stream), sleep(seconds));
    });
}
