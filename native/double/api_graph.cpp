// The interface: capture of streams, and graphs.
#include <algorithm>

#include "call.hpp"
#include "work.hpp"

using namespace ficco::driver_double;

namespace {

CaptureMode checked_mode(int mode) {
    if (mode < 0 || mode > static_cast<int>(CaptureMode::kRelaxed)) throw Failure{kInvalidValue};
    return static_cast<CaptureMode>(mode);
}

// The common code of the versions of cuStreamGetCaptureInfo; only the status must not be null.
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

Status instantiate(ExecHandle* executable, GraphHandle graph) {
    return call("cuGraphInstantiateWithFlags", [&](Driver& driver, Lock&) {
        driver.current();
        auto made = std::make_shared<Executable>(*driver.graphs.find(graph), new_handle());
        out(executable) = made->handle;
        driver.executables.add(std::move(made));
    });
}

}  // namespace

DOUBLE_API Status cuThreadExchangeStreamCaptureMode(int* mode) {
    return call("cuThreadExchangeStreamCaptureMode", [&](Driver&, Lock&) {
        CaptureMode& own = Captures::thread_mode();
        const CaptureMode next = checked_mode(out(mode));
        *mode = static_cast<int>(own);
        own = next;
    });
}

DOUBLE_API Status cuStreamBeginCapture_v2(StreamHandle handle, int mode) {
    return call("cuStreamBeginCapture", [&](Driver& driver, Lock&) {
        const auto stream = driver.stream(handle);
        if (stream->handle == nullptr) throw Failure{kCaptureUnsupported};
        driver.captures.begin(stream, checked_mode(mode));
    });
}

DOUBLE_API Status cuStreamBeginCapture(StreamHandle stream) {
    return cuStreamBeginCapture_v2(stream, static_cast<int>(CaptureMode::kGlobal));
}

DOUBLE_API Status cuStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
    return call("cuStreamEndCapture", [&](Driver& driver, Lock&) {
        out(graph) = nullptr;
        *graph = driver.captures.end(*driver.stream(stream));
    });
}

DOUBLE_API Status cuStreamIsCapturing(StreamHandle handle, int* status) {
    return call("cuStreamIsCapturing", [&](Driver& driver, Lock&) {
        out(status) = static_cast<int>(driver.captures.status(*driver.stream(handle)));
    });
}

DOUBLE_API Status cuStreamGetCaptureInfo(StreamHandle stream, int* status, std::uint64_t* id) {
    return call("cuStreamGetCaptureInfo", [&](Driver& driver, Lock&) {
        get_capture_info(driver, stream, status, id, nullptr, nullptr, nullptr);
    });
}

DOUBLE_API Status cuStreamGetCaptureInfo_v2(StreamHandle stream, int* status, std::uint64_t* id,
                                            GraphHandle* graph, const NodeHandle** dependencies,
                                            std::size_t* count) {
    return call("cuStreamGetCaptureInfo", [&](Driver& driver, Lock&) {
        get_capture_info(driver, stream, status, id, graph, dependencies, count);
    });
}

DOUBLE_API Status cuStreamGetCaptureInfo_v3(StreamHandle stream, int* status, std::uint64_t* id,
                                            GraphHandle* graph, const NodeHandle** dependencies,
                                            const EdgeData** edge_data, std::size_t* count) {
    return call("cuStreamGetCaptureInfo", [&](Driver& driver, Lock&) {
        get_capture_info(driver, stream, status, id, graph, dependencies, count);
        const auto asked = driver.stream(stream);
        if (edge_data == nullptr || !asked->capture || !asked->capture->valid) return;
        if (dependencies == nullptr) throw Failure{kInvalidValue};
        // An array parallel to the dependencies: cuda-bindings 13.5 reads it unconditionally.
        asked->edges.assign(asked->dependencies.size(), EdgeData{});
        *edge_data = asked->edges.data();
    });
}

DOUBLE_API Status cuGraphGetNodes(GraphHandle graph, NodeHandle* nodes, std::size_t* count) {
    return call("cuGraphGetNodes", [&](Driver& driver, Lock&) {
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
    });
}

DOUBLE_API Status cuGraphNodeGetType(NodeHandle node, int* type) {
    return call("cuGraphNodeGetType", [&](Driver& driver, Lock&) {
        out(type) = static_cast<int>(driver.nodes.find(node)->work.type);
    });
}

DOUBLE_API Status cuGraphDestroy(GraphHandle graph) {
    return call("cuGraphDestroy", [&](Driver& driver, Lock&) {
        const auto taken = driver.graphs.take(graph);  // it holds the nodes
        for (const auto& node : taken->nodes) driver.nodes.take(node->handle);
    });
}

DOUBLE_API Status cuGraphInstantiateWithFlags(ExecHandle* executable, GraphHandle graph,
                                              unsigned long long) {
    return instantiate(executable, graph);
}

// The interface of CUDA 11, which says more of an error. From CUDA 12 on this name means
// cuGraphInstantiateWithFlags where it is looked up by cuGetProcAddress.
DOUBLE_API Status cuGraphInstantiate(ExecHandle* executable, GraphHandle graph,
                                     NodeHandle* error_node, char* log, std::size_t log_bytes) {
    if (error_node != nullptr) *error_node = nullptr;
    if (log != nullptr && log_bytes > 0) *log = '\0';
    return instantiate(executable, graph);
}
DOUBLE_ALIAS(cuGraphInstantiate_v2, cuGraphInstantiate);

DOUBLE_API Status cuGraphLaunch(ExecHandle handle, StreamHandle stream) {
    return call("cuGraphLaunch", [&](Driver& driver, Lock&) {
        auto executable = driver.executables.find(handle);
        driver.submit(*driver.stream(stream),
                      {NodeType::kGraph, [executable](Context&) { executable->run(); }});
    });
}

DOUBLE_API Status cuGraphExecDestroy(ExecHandle executable) {
    return call("cuGraphExecDestroy",
                [&](Driver& driver, Lock&) { driver.executables.take(executable); });
}
