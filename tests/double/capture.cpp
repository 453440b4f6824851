// The rules of capture. The statuses, and what invalidates a capture, are those that driver
// 580.159 (CUDA 13.0) was seen to return.
#include "capture.hpp"

#include <algorithm>
#include <utility>

namespace ficco::driver_double {

namespace {

void unite(std::vector<NodeHandle>& nodes, const std::vector<NodeHandle>& more) {
    for (NodeHandle node : more) {
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
}

}  // namespace

CaptureMode& Captures::thread_mode() {
    thread_local CaptureMode mode = CaptureMode::kGlobal;
    return mode;
}

void Captures::check_valid(const Capture& capture) const {
    if (!capture.valid) throw Failure{kCaptureInvalidated};
}

void Captures::invalidate(Capture& capture, Status status) const {
    capture.valid = false;
    throw Failure{status};
}

void Captures::begin(const std::shared_ptr<Stream>& stream, CaptureMode mode) {
    if (stream->capture) throw Failure{kIllegalState};
    auto capture = std::make_shared<Capture>();
    capture->id = ++captures_;
    capture->graph = std::make_shared<Graph>(new_handle());
    capture->origin = stream->handle;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->streams.push_back(stream);
    graphs_.add(capture->graph);
    stream->capture = capture;
    stream->dependencies.clear();
    active_.push_back(std::move(capture));
}

GraphHandle Captures::end(Stream& stream) {
    const std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) throw Failure{kIllegalState};
    if (capture->origin != stream.handle) invalidate(*capture, kCaptureUnmatched);
    const std::vector<NodeHandle> joined = capture->graph->reached_from(stream.dependencies);
    finish(*capture);
    Status status = kSuccess;
    if (capture->mode != CaptureMode::kRelaxed && capture->thread != std::this_thread::get_id()) {
        status = kCaptureWrongThread;
    } else if (!capture->valid) {
        status = kCaptureInvalidated;
    } else if (joined.size() != capture->graph->nodes.size()) {
        status = kCaptureUnjoined;
    }
    if (status == kSuccess) return capture->graph->handle;
    discard(*capture);
    throw Failure{status};
}

void Captures::finish(Capture& capture) {
    for (const std::shared_ptr<Stream>& stream : std::exchange(capture.streams, {})) {
        stream->capture = nullptr;
        stream->dependencies.clear();
    }
    capture.active = false;
    std::erase_if(active_, [](const auto& other) { return !other->active; });
}

void Captures::discard(const Capture& capture) {
    for (const std::shared_ptr<Node>& node : capture.graph->nodes) nodes_.take(node->handle);
    graphs_.take(capture.graph->handle);
}

void Captures::add_node(Stream& stream, Work work) {
    Capture& capture = *stream.capture;
    check_valid(capture);
    if (!work.body) return;
    auto node = std::make_shared<Node>(
        Node{new_handle(), stream.context, std::move(work), stream.dependencies});
    nodes_.add(node);
    stream.dependencies = {node->handle};
    capture.graph->nodes.push_back(std::move(node));
}

void Captures::record(Stream& stream, Event& event) {
    check_valid(*stream.capture);
    event.capture = stream.capture;
    event.dependencies = stream.dependencies;
    event.last = nullptr;
}

void Captures::wait(const std::shared_ptr<Stream>& stream, const Event& event) {
    if (stream->capture) check_valid(*stream->capture);
    if (!event.capture) {
        if (!event.last) return;
        invalidate(*stream->capture, kCaptureIsolation);
    }
    if (!event.capture->active) {
        if (stream->capture) invalidate(*stream->capture, kInvalidValue);
        throw Failure{kInvalidValue};
    }
    if (stream->capture && stream->capture != event.capture) {
        stream->capture->valid = false;
        invalidate(*event.capture, kCaptureMerge);
    }
    check_valid(*event.capture);
    if (stream->handle == nullptr) invalidate(*event.capture, kCaptureUnsupported);
    if (!stream->capture) {
        stream->capture = event.capture;
        event.capture->streams.push_back(stream);
    }
    unite(stream->dependencies, event.dependencies);
}

void Captures::refuse_stream(const Stream& stream) {
    if (stream.capture) invalidate(*stream.capture, kCaptureUnsupported);
    refuse_null_stream(stream);
    refuse_unsafe();
}

void Captures::refuse_event(const Event& event) {
    if (!event.capture) return;
    if (!event.capture->active) throw Failure{kInvalidValue};
    invalidate(*event.capture, kCapturedEvent);
}

void Captures::refuse_context(const Context& context) {
    bool refused = false;
    for (const std::shared_ptr<Capture>& capture : active_) {
        for (const std::shared_ptr<Stream>& stream : capture->streams) {
            if (stream->context.get() != &context) continue;
            capture->valid = false;
            refused = true;
        }
    }
    if (refused) throw Failure{kCaptureUnsupported};
}

void Captures::refuse_unsafe() {
    if (thread_mode() == CaptureMode::kRelaxed) return;
    const bool everywhere = thread_mode() == CaptureMode::kGlobal;
    bool refused = false;
    for (const std::shared_ptr<Capture>& capture : active_) {
        const bool own = capture->thread == std::this_thread::get_id();
        if ((own && capture->mode != CaptureMode::kRelaxed) ||
            (everywhere && capture->mode == CaptureMode::kGlobal)) {
            capture->valid = false;
            refused = true;
        }
    }
    if (refused) throw Failure{kCaptureUnsupported};
}

bool Captures::blocks_null_stream(const Stream& stream, bool invalidate) {
    if (stream.handle != nullptr) return false;
    bool blocks = false;
    for (const std::shared_ptr<Capture>& capture : active_) {
        for (const std::shared_ptr<Stream>& other : capture->streams) {
            if (other->context != stream.context || (other->flags & kStreamNonBlocking) != 0) {
                continue;
            }
            if (invalidate) capture->valid = false;
            blocks = true;
        }
    }
    return blocks;
}

void Captures::refuse_null_stream(const Stream& stream) {
    if (blocks_null_stream(stream, true)) throw Failure{kCaptureImplicit};
}

CaptureStatus Captures::status(const Stream& stream) {
    if (blocks_null_stream(stream, false)) throw Failure{kCaptureImplicit};
    if (!stream.capture) return CaptureStatus::kNone;
    return stream.capture->valid ? CaptureStatus::kActive : CaptureStatus::kInvalidated;
}

void Captures::leave(const Stream& stream) {
    const std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) return;
    if (capture->origin == stream.handle) {
        finish(*capture);
        discard(*capture);
    } else {
        std::erase_if(capture->streams, [&](const auto& other) { return other.get() == &stream; });
    }
}

}  // namespace ficco::driver_double
