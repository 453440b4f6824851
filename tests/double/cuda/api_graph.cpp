// The interface: capture of streams, and graphs.
#include "calls.hpp"

using namespace ficco::driver_double;

namespace {

Status instantiate(ExecHandle* executable, GraphHandle graph) {
    return call("cuGraphInstantiateWithFlags",
                [&](Driver& driver, Lock&) { instantiate(driver, executable, graph); });
}

}  // namespace

DOUBLE_API Status cuThreadExchangeStreamCaptureMode(int* mode) {
    return call("cuThreadExchangeStreamCaptureMode", [&](Driver&, Lock&) { exchange_mode(mode); });
}

DOUBLE_API Status cuStreamBeginCapture_v2(StreamHandle handle, int mode) {
    return call("cuStreamBeginCapture",
                [&](Driver& driver, Lock&) { begin_capture(driver, handle, mode); });
}

DOUBLE_API Status cuStreamBeginCapture(StreamHandle stream) {
    return cuStreamBeginCapture_v2(stream, static_cast<int>(CaptureMode::kGlobal));
}

DOUBLE_API Status cuStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
    return call("cuStreamEndCapture",
                [&](Driver& driver, Lock&) { end_capture(driver, stream, graph); });
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
    return call("cuGraphGetNodes",
                [&](Driver& driver, Lock&) { get_nodes(driver, graph, nodes, count); });
}

DOUBLE_API Status cuGraphNodeGetType(NodeHandle node, int* type) {
    return call("cuGraphNodeGetType", [&](Driver& driver, Lock&) {
        out(type) = static_cast<int>(driver.nodes.find(node)->work.type);
    });
}

DOUBLE_API Status cuGraphDestroy(GraphHandle graph) {
    return call("cuGraphDestroy", [&](Driver& driver, Lock&) { destroy_graph(driver, graph); });
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
    return call("cuGraphLaunch",
                [&](Driver& driver, Lock&) { launch_graph(driver, handle, stream); });
}

DOUBLE_API Status cuGraphExecDestroy(ExecHandle executable) {
    return call("cuGraphExecDestroy",
                [&](Driver& driver, Lock&) { driver.executables.take(executable); });
}
