// Max-min sharing, and jumps from event to event. No clock: times are arguments.
#include "ficco/fluid.hpp"

#include <algorithm>

namespace ficco::fluid {

namespace {
// Remaining bytes that are only rounding errors.
constexpr double kNothing = 0.5;
// Shares that differ by less are equal; they are sums and differences of a few numbers.
constexpr double kEqual = 1.0 + 1e-9;
}  // namespace

double Model::prepare(std::span<Flow> flows, const Indices& live, double now_ns) {
    open_.clear();
    used_.clear();
    most_.resize(flows.size());
    for (const std::int32_t index : live) {
        Flow& flow = flows[static_cast<std::size_t>(index)];
        if (flow.start_ns > now_ns) continue;
        open_.push(index);
        flow.rate = 0.0;
        for (const std::int32_t number : flow.ports) {
            if (number >= 0) port(number).users = 0;
        }
    }
    for (const std::int32_t index : open_) {
        for (const std::int32_t number : flows[static_cast<std::size_t>(index)].ports) {
            if (number >= 0 && port(number).users++ == 0) used_.push_back(number);
        }
    }
    std::size_t places = 0;
    for (const std::int32_t number : used_) {
        const auto& rates =
            rates_[static_cast<std::size_t>(kinds_[static_cast<std::size_t>(number)])];
        const auto users = static_cast<std::size_t>(port(number).users);
        port(number).room = rates[std::min(users, rates.size()) - 1];
        port(number).first = port(number).end = places;
        places += users;
    }
    users_.resize(places);
    double least = kNever;
    for (const std::int32_t index : open_) {
        const Flow& flow = flows[static_cast<std::size_t>(index)];
        double& most = most_[static_cast<std::size_t>(index)];
        most = flow.limit;
        for (const std::int32_t number : flow.ports) {
            if (number < 0) continue;
            Port& through = port(number);
            if (through.users == 1) most = std::min(most, through.room);
            users_[through.end++] = index;
        }
        least = std::min(least, most);
    }
    std::erase_if(used_, [this](std::int32_t number) { return port(number).users == 1; });
    return least;
}

void Model::share(std::span<Flow> flows, const Indices& live, double now_ns) {
    double least = prepare(flows, live, now_ns);  // no open flow has a lower `most`
    std::int32_t open = open_.count;
    const auto settle = [&](Flow& flow, double level) {
        flow.rate = level;
        --open;
        for (const std::int32_t number : flow.ports) {
            if (number < 0) continue;
            port(number).room -= level;
            --port(number).users;
        }
    };
    while (open > 0) {
        double level = least;
        for (const std::int32_t number : used_) {
            level = std::min(level, port(number).room / port(number).users);
        }
        for (const std::int32_t number : used_) {
            const Port& full = port(number);
            if (full.room > level * kEqual * full.users) continue;
            for (std::size_t at = full.first; at < full.end; ++at) {
                Flow& flow = flows[static_cast<std::size_t>(users_[at])];
                if (flow.rate == 0.0) settle(flow, level);
            }
        }
        if (least <= level) {
            least = kNever;
            open_.erase_if([&](std::int32_t index) {
                Flow& flow = flows[static_cast<std::size_t>(index)];
                const double most = most_[static_cast<std::size_t>(index)];
                if (flow.rate == 0.0 && most <= level * kEqual) settle(flow, level);
                if (flow.rate > 0.0) return true;
                least = std::min(least, most);
                return false;
            });
        }
        std::erase_if(used_, [this](std::int32_t number) { return port(number).users == 0; });
    }
}

double Model::next(std::span<const Flow> flows, const Indices& live, double now_ns) {
    double next = kNever;
    for (const std::int32_t index : live) {
        const Flow& flow = flows[static_cast<std::size_t>(index)];
        next = std::min(
            next, flow.start_ns > now_ns ? flow.start_ns : now_ns + flow.left_bytes / flow.rate);
    }
    return next;
}

void Model::move(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                 Indices& ended) {
    live.erase_if([&](std::int32_t index) {
        Flow& flow = flows[static_cast<std::size_t>(index)];
        if (flow.start_ns > now_ns) return false;
        // By time and by bytes; otherwise a step too small for a double would make no progress.
        const bool due = now_ns + flow.left_bytes / flow.rate <= until_ns;
        flow.left_bytes -= flow.rate * (until_ns - now_ns);
        if (!due && flow.left_bytes > kNothing) return false;
        flow.end_ns = until_ns;
        ended.push(index);
        return true;
    });
}

double Model::advance(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                      int max_ends) {
    ended_.clear();
    while (!live.empty()) {
        share(flows, live, now_ns);
        const double next_ns = std::min(until_ns, next(flows, live, now_ns));
        move(flows, live, now_ns, next_ns, ended_);
        now_ns = next_ns;
        if (now_ns >= until_ns || ended_.count >= max_ends) break;
    }
    return live.empty() && until_ns < kNever ? until_ns : now_ns;
}

}  // namespace ficco::fluid
