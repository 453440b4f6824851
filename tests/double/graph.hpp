// Captured graphs, and instantiated graphs.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "abi.hpp"
#include "completion.hpp"
#include "context.hpp"

namespace ficco::driver_double {

struct Node {
    NodeHandle handle;
    std::shared_ptr<Context> context;
    Work work;
    std::vector<NodeHandle> after;  // nodes that come before this one in the graph, too
};

struct Graph {
    explicit Graph(GraphHandle handle) : handle(handle) {}

    // The `leaves` and all nodes that they depend on.
    std::vector<NodeHandle> reached_from(const std::vector<NodeHandle>& leaves) const;

    const GraphHandle handle;
    std::vector<std::shared_ptr<Node>> nodes;
};

// A graph cut into chains of nodes that depend on their predecessor. Chains run concurrently.
class Executable : public std::enable_shared_from_this<Executable> {
  public:
    Executable(const Graph& graph, ExecHandle handle);

    void run();  // one launch at a time; returns when all nodes are done

    const ExecHandle handle;

  private:
    struct Step {
        std::shared_ptr<Node> node;
        std::vector<std::size_t> after;
    };
    using Dones = std::vector<Completion>;  // of every step, in one launch

    void run_chain(const std::vector<std::size_t>& chain, Dones& dones) const;

    std::mutex running_;
    std::vector<Step> steps_;
    std::vector<std::vector<std::size_t>> chains_;
};

}  // namespace ficco::driver_double
