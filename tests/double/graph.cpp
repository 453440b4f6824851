// Cutting a graph into chains and running them on threads.
#include "graph.hpp"

#include <algorithm>
#include <map>

#include "faults.hpp"
#include "queue.hpp"

namespace ficco::driver_double {

std::vector<NodeHandle> Graph::reached_from(const std::vector<NodeHandle>& leaves) const {
    std::vector<NodeHandle> reached = leaves;
    // Nodes stand behind those they depend on, so one way from the end suffices.
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
        if (std::find(reached.begin(), reached.end(), (*node)->handle) == reached.end()) continue;
        for (NodeHandle before : (*node)->after) {
            if (std::find(reached.begin(), reached.end(), before) == reached.end()) {
                reached.push_back(before);
            }
        }
    }
    return reached;
}

Executable::Executable(const Graph& graph, ExecHandle handle) : handle(handle) {
    std::map<NodeHandle, std::size_t> index_of;
    std::map<std::size_t, std::size_t> chain_ending_with;
    for (const std::shared_ptr<Node>& node : graph.nodes) {
        Step step{node, {}};
        for (NodeHandle before : node->after) step.after.push_back(index_of.at(before));
        const std::size_t index = steps_.size();
        index_of[node->handle] = index;
        const auto before =
            std::find_if(step.after.begin(), step.after.end(),
                         [&](std::size_t other) { return chain_ending_with.contains(other); });
        std::size_t chain = chains_.size();
        if (before == step.after.end()) {
            chains_.emplace_back();
        } else {
            chain = chain_ending_with.at(*before);
            chain_ending_with.erase(*before);
        }
        chains_[chain].push_back(index);
        chain_ending_with[index] = chain;
        steps_.push_back(std::move(step));
    }
}

void Executable::run() {
    const std::lock_guard lock(running_);
    Faults::get().count("graph", 1);
    const auto dones = std::make_shared<Dones>(steps_.size());
    for (std::size_t i = 1; i < chains_.size(); ++i) {
        // Detached, so that a host function may end this thread (see Context::run).
        start_thread("double graph", [self = shared_from_this(), dones, i] {
            self->run_chain(self->chains_[i], *dones);
        }).detach();
    }
    if (!chains_.empty()) run_chain(chains_[0], *dones);
    for (const Completion& done : *dones) done.wait();
}

void Executable::run_chain(const std::vector<std::size_t>& chain, Dones& dones) const {
    for (std::size_t index : chain) {
        const Step& step = steps_[index];
        for (std::size_t before : step.after) dones[before].wait();
        step.node->context->run(step.node->work);
        dones[index].finish();
    }
}

}  // namespace ficco::driver_double
