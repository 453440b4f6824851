// Devices, contexts and streams: how they begin and end, and how work reaches a queue.
#include "driver.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "faults.hpp"

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
    : version(number("FICCO_DOUBLE_VERSION", 13000)),
      peers([] {
          const char* text = std::getenv("FICCO_DOUBLE_PEERS");
          return text == nullptr || std::strcmp(text, "none") != 0;
      }()),
      ready(false),
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
        device.context = std::make_shared<Context>(ordinal, device.handle);
        contexts.add(device.context);
    }
    ++device.retains;
    return device.context;
}

void Driver::release(int ordinal) {
    Device& device = this->device(ordinal);
    if (device.retains == 0) throw Failure{kInvalidContext};
    if (--device.retains == 0) end_context(device);
}

void Driver::reset(int ordinal) {
    Device& device = this->device(ordinal);
    if (!device.context) return;
    device.retains = 0;
    end_context(device);
}

void Driver::end_context(Device& device) {
    const std::shared_ptr<Context> context = std::exchange(device.context, nullptr);
    context->end();
    const auto own = [&](const auto& object) { return object.context == context; };
    for (const auto& stream : streams.select(own)) destroy_stream(stream->handle);
    for (const auto& event : events.select(own)) events.take(event->handle);
    if (device.null_stream && !device.null_stream->shares_queue) device.null_stream->queue->close();
    if (device.shared_queue) device.shared_queue->close();
    device.null_stream = nullptr;
    device.shared_queue = nullptr;
    memory.release_device(context->device);
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
        Device& device = this->device(context->device);
        if (!device.null_stream) {
            bool shared = false;
            const auto queue = queue_for(device, 0, shared);
            device.null_stream = std::make_shared<Stream>(
                Stream{nullptr, context, 0, 0, queue, shared, nullptr, nullptr, {}});
        }
        return device.null_stream;
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

std::shared_ptr<Queue> Driver::queue_for(Device& device, int priority, bool& shared) {
    const std::string name = "double " + std::to_string(device.context->device);
    shared = Faults::get().single_queue() && priority == 0;
    if (!shared) return Queue::start(name);
    if (!device.shared_queue) device.shared_queue = Queue::start(name);
    return device.shared_queue;
}

std::shared_ptr<Stream> Driver::make_stream(unsigned flags, int priority) {
    const std::shared_ptr<Context> context = current();
    if ((flags & ~kStreamNonBlocking) != 0) throw Failure{kInvalidValue};
    bool shared = false;
    const auto queue = queue_for(device(context->device), priority, shared);
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
    const Device& owner = device(context.device);
    if (owner.null_stream) add(*owner.null_stream);
    return pending;
}

}  // namespace ficco::driver_double
