#include "ficco/fluid.hpp"

#include <algorithm>

namespace ficco::fluid {

namespace {
// Bytes that are left by rounding alone.
constexpr double kNothing = 0.5;
// Shares that differ by less are equal; they are sums and differences of few numbers.
constexpr double kEqual = 1.0 + 1e-9;
}  // namespace

void Model::share(std::span<Flow> flows, const Indices& live, double now_ns) {
    open_.clear();
    for (const std::int32_t index : live) {
        const Flow& flow = flows[static_cast<std::size_t>(index)];
        if (flow.start_ns > now_ns) continue;
        open_.push(index);
        for (const std::int32_t port : flow.ports) {
            if (port < 0) continue;
            room_[static_cast<std::size_t>(port)] = rate_;
            users_[static_cast<std::size_t>(port)] = 0;
        }
    }
    for (const std::int32_t index : open_) {
        for (const std::int32_t port : flows[static_cast<std::size_t>(index)].ports) {
            if (port >= 0) ++users_[static_cast<std::size_t>(port)];
        }
    }
    const auto bound = [this](const Flow& flow) {  // what the fuller of its ports leaves a flow
        double least = kNever;
        for (const std::int32_t port : flow.ports) {
            if (port < 0) continue;
            const auto at = static_cast<std::size_t>(port);
            least = std::min(least, room_[at] / users_[at]);
        }
        return least;
    };
    while (!open_.empty()) {
        double level = kNever;
        for (const std::int32_t index : open_) {
            level = std::min(level, bound(flows[static_cast<std::size_t>(index)]));
        }
        // Settling one flow of a full port leaves the share of its other flows as it is, so that
        // all flows of all ports that are full at this level are found in one pass.
        open_.erase_if([&](std::int32_t index) {
            Flow& flow = flows[static_cast<std::size_t>(index)];
            if (bound(flow) > level * kEqual) return false;
            flow.rate = level;
            for (const std::int32_t port : flow.ports) {
                if (port < 0) continue;
                room_[static_cast<std::size_t>(port)] -= level;
                --users_[static_cast<std::size_t>(port)];
            }
            return true;
        });
    }
}

double Model::advance(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                      int max_ends) {
    while (!live.empty()) {
        share(flows, live, now_ns);
        double next = until_ns;
        for (const std::int32_t index : live) {
            const Flow& flow = flows[static_cast<std::size_t>(index)];
            next = std::min(next, flow.start_ns > now_ns ? flow.start_ns
                                                         : now_ns + flow.left_bytes / flow.rate);
        }
        live.erase_if([&](std::int32_t index) {
            Flow& flow = flows[static_cast<std::size_t>(index)];
            if (flow.start_ns > now_ns) return false;
            // By time as well as by bytes, or a step too small for a double would be no progress.
            const bool due = now_ns + flow.left_bytes / flow.rate <= next;
            flow.left_bytes -= flow.rate * (next - now_ns);
            if (!due && flow.left_bytes > kNothing) return false;
            flow.end_ns = next;
            --max_ends;
            return true;
        });
        now_ns = next;
        if (now_ns >= until_ns || max_ends <= 0) break;
    }
    return live.empty() && until_ns < kNever ? until_ns : now_ns;
}

}  // namespace ficco::fluid
