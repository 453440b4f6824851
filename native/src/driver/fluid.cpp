// Max-min sharing and jumping from event to event. No clock: times are arguments.
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
    const auto of = [&flows](std::int32_t index) -> Flow& {
        return flows[static_cast<std::size_t>(index)];
    };
    const auto port = [this](std::int32_t number) -> Port& {
        return ports_[static_cast<std::size_t>(number)];
    };

    open_.clear();
    used_.clear();
    for (const std::int32_t index : live) {
        if (of(index).start_ns > now_ns) continue;
        open_.push(index);
        for (const std::int32_t number : of(index).ports) {
            if (number >= 0) port(number) = {rate_, 0, false};
        }
    }
    for (const std::int32_t index : open_) {
        for (const std::int32_t number : of(index).ports) {
            if (number >= 0 && port(number).users++ == 0) used_.push_back(number);
        }
    }
    while (!open_.empty()) {
        double level = kNever;
        for (const std::int32_t number : used_) {
            if (port(number).users > 0)
                level = std::min(level, port(number).room / port(number).users);
        }
        for (const std::int32_t number : used_) {
            port(number).full = port(number).room <= level * kEqual * port(number).users;
        }
        open_.erase_if([&](std::int32_t index) {
            Flow& flow = of(index);
            if (!port(flow.ports[0]).full && (flow.ports[1] < 0 || !port(flow.ports[1]).full)) {
                return false;
            }
            flow.rate = level;
            for (const std::int32_t number : flow.ports) {
                if (number < 0) continue;
                port(number).room -= level;
                --port(number).users;
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
