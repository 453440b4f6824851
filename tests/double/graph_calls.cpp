// Calls on captures and graphs, of every vendor.
#include <algorithm>
#include <utility>

#include "calls.hpp"

namespace ficco::driver_double {

namespace {

CaptureMode checked_mode(int mode) {
    if (mode < 0 || mode > static_cast<int>(CaptureMode::kRelaxed)) throw Failure{kInvalidValue};
    return static_cast<CaptureMode>(mode);
}

}  // namespace

void get_capture_info(Driver& driver, StreamHandle handle, int* status, std::uint64_t* id,
                      GraphHandle* graph, const NodeHandle** dependencies, std::size_t* count) {
    const auto stream = driver.stream(handle);
    out(status) = static_cast<int>(driver.captures.status(*stream));
    if (!stream->capture) return;
    if (id != nullptr) *id = stream->capture->id;
    if (!stream->capture->valid) return;
    if (graph != nullptr) *graph = stream->capture->graph->handle;
    if (dependencies != nullptr) *dependencies = stream->dependencies.data();
    if (count != nullptr) *count = stream->dependencies.size();
}

void exchange_mode(int* mode) {
    CaptureMode& own = Captures::thread_mode();
    const CaptureMode next = checked_mode(out(mode));
    *mode = static_cast<int>(own);
    own = next;
}

void begin_capture(Driver& driver, StreamHandle handle, int mode) {
    const auto stream = driver.stream(handle);
    if (stream->handle == nullptr) throw Failure{kCaptureUnsupported};
    driver.captures.begin(stream, checked_mode(mode));
}

void end_capture(Driver& driver, StreamHandle stream, GraphHandle* graph) {
    out(graph) = nullptr;
    *graph = driver.captures.end(*driver.stream(stream));
}

void get_nodes(Driver& driver, GraphHandle graph, NodeHandle* nodes, std::size_t* count) {
    const auto& all = driver.graphs.find(graph)->nodes;
    if (nodes != nullptr) {
        const std::size_t room = out(count);
        for (std::size_t i = 0; i < room; ++i) {
            nodes[i] = i < all.size() ? all[i]->handle : nullptr;
        }
        *count = std::min(room, all.size());
    } else {
        out(count) = all.size();
    }
}

void destroy_graph(Driver& driver, GraphHandle graph) {
    const auto taken = driver.graphs.take(graph);  // it holds the nodes
    for (const auto& node : taken->nodes) driver.nodes.take(node->handle);
}

void instantiate(Driver& driver, ExecHandle* executable, GraphHandle graph) {
    driver.current();
    auto made = std::make_shared<Executable>(*driver.graphs.find(graph), new_handle());
    out(executable) = made->handle;
    driver.executables.add(std::move(made));
}

void launch_graph(Driver& driver, ExecHandle handle, StreamHandle stream) {
    auto executable = driver.executables.find(handle);
    driver.submit(*driver.stream(stream),
                  {NodeType::kGraph, [executable](Context&) { executable->run(); }});
}

}  // namespace ficco::driver_double
