// Devices, contexts and streams: creation and destruction, and the path of work to a queue.
#include "driver.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "call_log.hpp"
#include "faults.hpp"
#include "vendor.hpp"

namespace ficco::driver_double {

namespace {

constexpr int kMostDevices = 64;  // bits of a context's peers

int number(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoi(text);
}

bool is_null_stream(StreamHandle handle) {  // and CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
    return reinterpret_cast<std::uintptr_t>(handle) <= 2;
}

}  // namespace

Handle new_handle() {
    static std::atomic<std::uintptr_t> next{0xD0B1E0000};
    return reinterpret_cast<Handle>(next.fetch_add(16));
}

Driver& Driver::get() {
    static Driver& driver = *new Driver;
    return driver;
}

Driver::Driver()
    : version(number("FICCO_DOUBLE_VERSION", kVendor.version)),
      peers([] {
          const char* text = std::getenv("FICCO_DOUBLE_PEERS");
          return text == nullptr || std::strcmp(text, "none") != 0;
      }()),
      ready(kVendor.ready),
      memory(std::clamp(number("FICCO_DOUBLE_DEVICES", 4), 0, kMostDevices)),
      devices_(static_cast<std::size_t>(
          std::clamp(number("FICCO_DOUBLE_DEVICES", 4), 0, kMostDevices))) {
    for (Device& device : devices_) device.handle = new_handle();
}

Driver::Device& Driver::device(int ordinal) {
    if (ordinal < 0 || ordinal >= device_count()) throw Failure{kInvalidDevice};
    return devices_[static_cast<std::size_t>(ordinal)];
}

std::shared_ptr<Context> Driver::retain(int ordinal) {
    Device& device = this->device(ordinal);
    if (!device.context) {
        device.context = std::make_shared<Context>(ordinal, device.handle, true);
        contexts.add(device.context);
    }
    ++device.retains;
    return device.context;
}

void Driver::release(int ordinal) {
    Device& device = this->device(ordinal);
    if (device.retains == 0) throw Failure{kInvalidContext};
    if (--device.retains == 0) end_context(std::exchange(device.context, nullptr));
}

void Driver::reset(int ordinal) {
    Device& device = this->device(ordinal);
    if (!device.context) return;
    device.retains = 0;
    end_context(std::exchange(device.context, nullptr));
}

std::shared_ptr<Context> Driver::create(int ordinal) {
    device(ordinal);
    auto context = std::make_shared<Context>(ordinal, new_handle(), false);
    contexts.add(context);
    Faults::get().count("context", 1);
    return context;
}

void Driver::destroy(ContextHandle handle, std::unique_lock<std::mutex>& lock) {
    const std::shared_ptr<Context> context = contexts.find(handle);
    if (context->primary) throw Failure{kInvalidContext};
    end_context(context);
    std::vector<ContextHandle>& pushed = thread_contexts();
    if (!pushed.empty() && pushed.back() == handle) pushed.pop_back();
    const auto works = [&] {
        const auto alive = [&](const Context& each) {
            return each.device == context->device && !each.over();
        };
        for (const auto& other : contexts.select(alive)) {
            for (const auto& each : pending(*other)) {
                if (!each->done()) return each;
            }
        }
        return std::shared_ptr<Completion>();
    };
    ++being_destroyed_;
    while (const auto work = works()) {
        lock.unlock();
        work->wait();
        lock.lock();
    }
    --being_destroyed_;
    destroyed_.notify_all();
}

void Driver::await_destroyed(std::unique_lock<std::mutex>& lock) {
    destroyed_.wait(lock, [&] { return being_destroyed_ == 0; });
}

void Driver::end_context(const std::shared_ptr<Context>& context) {
    context->end();
    const auto own = [&](const auto& object) { return object.context == context; };
    for (const auto& stream : streams.select(own)) destroy_stream(stream->handle);
    for (const auto& event : events.select(own)) events.take(event->handle);
    const auto null_stream = std::exchange(context->null_stream, nullptr);
    if (null_stream && !null_stream->shares_queue) null_stream->queue->close();
    for (const auto& [priority, pool] : context->shared_queues) {
        for (const auto& queue : pool.queues) queue->close();
    }
    if (context->primary) memory.release_device(context->device);
    contexts.take(context->handle);
}

std::vector<ContextHandle>& Driver::thread_contexts() {
    thread_local std::vector<ContextHandle> contexts;
    return contexts;
}

std::shared_ptr<Context> Driver::current() {
    const std::vector<ContextHandle>& pushed = thread_contexts();
    if (pushed.empty() || pushed.back() == nullptr) throw Failure{kInvalidContext};
    std::shared_ptr<Context> context = contexts.find(pushed.back());
    if (context->status() != kSuccess) throw Failure{context->status()};
    return context;
}

std::shared_ptr<Stream> Driver::stream(StreamHandle handle) {
    if (is_null_stream(handle)) {
        const std::shared_ptr<Context> context = current();
        if (!context->null_stream) {
            bool shared = false;
            const auto queue = queue_for(*context, 0, shared);
            context->null_stream = std::make_shared<Stream>(
                Stream{nullptr, context, 0, 0, queue, shared, nullptr, nullptr, {}});
        }
        return context->null_stream;
    }
    std::shared_ptr<Stream> stream = streams.find(handle);
    if (stream->context->status() != kSuccess) throw Failure{stream->context->status()};
    return stream;
}

std::shared_ptr<Event> Driver::event(EventHandle handle) {
    std::shared_ptr<Event> event = events.find(handle);
    if (event->context->status() != kSuccess) throw Failure{event->context->status()};
    return event;
}

std::shared_ptr<Queue> Driver::queue_for(Context& context, int priority, bool& shared) {
    const std::string name = "double " + std::to_string(context.device);
    const Faults::Queues limit = Faults::get().queues();
    shared = limit.count > 0;
    if (!shared) return Queue::start(name);
    Context::QueuePool& pool = context.shared_queues[limit.by_priority ? priority : 0];
    const std::size_t turn = pool.streams++ % limit.count;
    if (turn == pool.queues.size()) pool.queues.push_back(Queue::start(name));
    return pool.queues[std::min(turn, pool.queues.size() - 1)];
}

std::shared_ptr<Stream> Driver::make_stream(unsigned flags, int priority) {
    const std::shared_ptr<Context> context = current();
    if ((flags & ~kStreamNonBlocking) != 0) throw Failure{kInvalidValue};
    bool shared = false;
    const auto queue = queue_for(*context, priority, shared);
    auto stream = std::make_shared<Stream>(
        Stream{new_handle(), context, flags, priority, queue, shared, nullptr, nullptr, {}});
    streams.add(stream);
    return stream;
}

void Driver::destroy_stream(StreamHandle handle) {
    const std::shared_ptr<Stream> stream = streams.take(handle);
    captures.leave(*stream);
    if (!stream->shares_queue) stream->queue->close();
}

std::shared_ptr<Completion> Driver::submit(Stream& stream, Work work) {
    if (stream.capture) {
        captures.add_node(stream, std::move(work));
        return nullptr;
    }
    captures.refuse_null_stream(stream);
    if (!work.body) return stream.last;
    CallLog::get().add(stream.handle, work.log_line);
    stream.last = stream.queue->push(stream.context, std::move(work));
    return stream.last;
}

std::vector<std::shared_ptr<Completion>> Driver::pending(const Context& context) {
    std::vector<std::shared_ptr<Completion>> pending;
    const auto add = [&](const Stream& stream) {
        if (stream.last) pending.push_back(stream.last);
        return false;
    };
    streams.select(
        [&](const Stream& stream) { return stream.context.get() == &context && add(stream); });
    if (context.null_stream) add(*context.null_stream);
    return pending;
}

}  // namespace ficco::driver_double
