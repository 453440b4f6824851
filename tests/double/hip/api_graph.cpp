// The interface: capture of streams, and graphs.
#include "hip_call.hpp"

using namespace ficco::driver_double;

DOUBLE_API Status hipThreadExchangeStreamCaptureMode(int* mode) {
    return hip_call("hipThreadExchangeStreamCaptureMode",
                    [&](Driver&, Lock&) { exchange_mode(mode); });
}

DOUBLE_API Status hipStreamBeginCapture(StreamHandle stream, int mode) {
    return hip_call("hipStreamBeginCapture",
                    [&](Driver& driver, Lock&) { begin_capture(driver, stream, mode); });
}

DOUBLE_API Status hipStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
    return hip_call("hipStreamEndCapture",
                    [&](Driver& driver, Lock&) { end_capture(driver, stream, graph); });
}

DOUBLE_API Status hipStreamIsCapturing(StreamHandle stream, int* status) {
    return hip_call("hipStreamIsCapturing", [&](Driver& driver, Lock&) {
        out(status) = static_cast<int>(driver.captures.status(*driver.stream(stream)));
    });
}

DOUBLE_API Status hipStreamGetCaptureInfo_v2(StreamHandle stream, int* status,
                                             unsigned long long* id, GraphHandle* graph,
                                             const NodeHandle** dependencies, std::size_t* count) {
    return hip_call("hipStreamGetCaptureInfo_v2", [&](Driver& driver, Lock&) {
        std::uint64_t found = 0;
        get_capture_info(driver, stream, status, &found, graph, dependencies, count);
        if (id != nullptr) *id = found;
    });
}

DOUBLE_API Status hipGraphGetNodes(GraphHandle graph, NodeHandle* nodes, std::size_t* count) {
    return hip_call("hipGraphGetNodes",
                    [&](Driver& driver, Lock&) { get_nodes(driver, graph, nodes, count); });
}

DOUBLE_API Status hipGraphNodeGetType(NodeHandle node, int* type) {
    return hip_call("hipGraphNodeGetType", [&](Driver& driver, Lock&) {
        out(type) = static_cast<int>(driver.nodes.find(node)->work.type);
    });
}

DOUBLE_API Status hipGraphInstantiateWithFlags(ExecHandle* executable, GraphHandle graph,
                                               unsigned long long) {
    return hip_call("hipGraphInstantiateWithFlags",
                    [&](Driver& driver, Lock&) { instantiate(driver, executable, graph); });
}

DOUBLE_API Status hipGraphLaunch(ExecHandle executable, StreamHandle stream) {
    return hip_call_on(stream, "hipGraphLaunch",
                       [&](Driver& driver, Lock&) { launch_graph(driver, executable, stream); });
}

DOUBLE_API Status hipGraphExecDestroy(ExecHandle executable) {
    return hip_call("hipGraphExecDestroy",
                    [&](Driver& driver, Lock&) { driver.executables.take(executable); });
}

DOUBLE_API Status hipGraphDestroy(GraphHandle graph) {
    return hip_call("hipGraphDestroy",
                    [&](Driver& driver, Lock&) { destroy_graph(driver, graph); });
}
