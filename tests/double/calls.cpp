// Calls on memory, streams and events, of every vendor.
#include "calls.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels.hpp"

namespace ficco::driver_double {

namespace {

constexpr unsigned kMostEventFlags = 7;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kSharedWithoutAsking = 48U << 10;

std::string name_of(EventHandle event) {
    return std::to_string(reinterpret_cast<std::uintptr_t>(event));
}

}  // namespace

void enqueue(Driver& driver, StreamHandle stream, Work work) {
    driver.submit(*driver.stream(stream), std::move(work));
}

void enqueue_fill(Driver& driver, StreamHandle handle, Address target, std::uint32_t value,
                  std::size_t value_bytes, std::size_t count) {
    const auto stream = driver.stream(handle);
    driver.submit(*stream, fill(*stream->context, target, value, value_bytes, count));
}

void run_now(Driver& driver, Lock& lock, Work work) {
    const auto context = driver.current();
    const auto completion = driver.submit(*driver.stream(nullptr), std::move(work));
    lock.unlock();
    if (completion) completion->wait();
    if (context->status() != kSuccess) throw Failure{context->status()};
}

Address allocate(Driver& driver, Block::Kind kind, std::size_t bytes, Sharing sharing) {
    const int device = driver.current()->device;
    driver.captures.refuse_unsafe();
    return driver.memory.allocate(kind, device, bytes, sharing);
}

void free_device(Driver& driver, Lock& lock, Address address) {
    driver.captures.refuse_unsafe();
    if (address == 0) return;
    const auto block = driver.memory.find(address);
    if (!block || block->kind != Block::Kind::kDevice || block->address != address) {
        throw Failure{kInvalidValue};
    }
    // As the real one may, which is what makes a free while a stream waits for another a trap.
    const auto context = driver.device(block->device).context;
    const auto pending = driver.pending(*context);
    lock.unlock();
    for (const auto& completion : pending) completion->wait();
    if (context->status() != kSuccess) throw Failure{context->status()};
    driver.memory.release(Block::Kind::kDevice, address);
}

void free_host(Driver& driver, Block::Kind kind, void* address) {
    driver.current();
    driver.captures.refuse_unsafe();
    driver.memory.release(kind, reinterpret_cast<Address>(address));
}

void create_stream(Driver& driver, StreamHandle* stream, unsigned flags, int priority) {
    out(stream) = driver.make_stream(flags, priority)->handle;
}

Status query(Driver& driver, StreamHandle handle) {
    const auto stream = driver.stream(handle);
    driver.captures.refuse_stream(*stream);
    return !stream->last || stream->last->done() ? kSuccess : kNotReady;
}

void synchronize(Driver& driver, Lock& lock, const std::shared_ptr<Context>& context) {
    driver.captures.refuse_context(*context);
    const auto pending = driver.pending(*context);
    lock.unlock();
    for (const auto& completion : pending) completion->wait();
    if (context->status() != kSuccess) throw Failure{context->status()};
}

Status synchronize(Driver& driver, Lock& lock, StreamHandle handle) {
    const auto stream = driver.stream(handle);
    driver.captures.refuse_stream(*stream);
    const auto last = stream->last;
    lock.unlock();
    if (last) last->wait();
    return stream->context->status();
}

void create_event(Driver& driver, EventHandle* event, unsigned flags) {
    const auto context = driver.current();
    if (flags > kMostEventFlags) throw Failure{kInvalidValue};
    auto made = std::make_shared<Event>(Event{new_handle(), context, flags, nullptr, {}, {}});
    out(event) = made->handle;
    driver.events.add(std::move(made));
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

void wait_for_event(Driver& driver, StreamHandle stream_handle, EventHandle event_handle,
                    unsigned flags) {
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
}

Status query_event(Driver& driver, EventHandle handle) {
    const auto event = driver.event(handle);
    driver.captures.refuse_event(*event);
    driver.captures.refuse_unsafe();
    return !event->last || event->last->done() ? kSuccess : kNotReady;
}

Status synchronize_event(Driver& driver, Lock& lock, EventHandle handle) {
    const auto event = driver.event(handle);
    driver.captures.refuse_event(*event);
    driver.captures.refuse_unsafe();
    const auto last = event->last;
    lock.unlock();
    if (last) last->wait();
    return event->context->status();
}

Status elapsed(Driver& driver, float* milliseconds, EventHandle start, EventHandle end) {
    const auto from = driver.event(start);
    const auto to = driver.event(end);
    driver.captures.refuse_event(*from);
    driver.captures.refuse_event(*to);
    if (from->context != to->context || ((from->flags | to->flags) & kEventDisableTiming) != 0) {
        throw Failure{kInvalidHandle};
    }
    if (!from->last || !to->last) throw Failure{kInvalidHandle};
    if (!from->last->done() || !to->last->done()) return kNotReady;
    out(milliseconds) =
        static_cast<float>(to->last->time_ns() - from->last->time_ns()) / 1'000'000.0F;
    return kSuccess;
}

void launch(Driver& driver, FunctionHandle function, const Shape& shape, StreamHandle stream,
            void** parameters, void** extra, unsigned most_shared) {
    const auto found = Kernels::get().find(function);
    const auto on = driver.stream(stream);
    if (found->context != nullptr && found->context != on->context->handle) {
        throw Failure{kInvalidHandle};
    }
    if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0 || shape[3] == 0 ||
        shape[3] > kMostThreads || shape[4] > most_shared || extra != nullptr) {
        throw Failure{kInvalidValue};
    }
    if (found->code && shape[4] > std::max(kSharedWithoutAsking, found->most_shared_bytes)) {
        throw Failure{kInvalidValue};
    }
    driver.submit(*on, kernel(*found, shape, parameters));
}

}  // namespace ficco::driver_double
