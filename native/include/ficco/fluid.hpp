// How transfers share links: a fluid model with max-min fairness. Numbers only: no clock, no
// thread.
//
// Each transfer is a flow through one or two ports of equal rate. The rates of all flows are raised
// together; where a port is full its flows keep what they have and the others go on (progressive
// filling). Rates change only when a flow starts or ends, so the model jumps from event to event.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "ficco/limits.hpp"

namespace ficco::fluid {

inline constexpr int kMaxPorts = kMaxWorld * kMaxWorld;  // a link of its own for each pair of ranks
inline constexpr int kMaxFlows = kMaxWorld * kMaxWorld;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

// Plain data, so that it can lie in shared memory. Times are in ns, rates in bytes per ns (GB/s).
struct Flow {
    std::int32_t ports[2];  // the second is -1 where a flow goes through one only
    double start_ns;        // before it no bandwidth is used
    double left_bytes;
    double rate;
    double end_ns;  // kNever until the flow has ended
};

// Indices of flows. Plain data of a fixed size, too.
struct Indices {
    std::int32_t count = 0;
    std::array<std::int32_t, kMaxFlows> values;

    std::int32_t* begin() noexcept { return values.data(); }
    std::int32_t* end() noexcept { return values.data() + count; }
    const std::int32_t* begin() const noexcept { return values.data(); }
    const std::int32_t* end() const noexcept { return values.data() + count; }
    bool empty() const noexcept { return count == 0; }
    void clear() noexcept { count = 0; }
    void push(std::int32_t index) noexcept { values[static_cast<std::size_t>(count++)] = index; }
    template <class Predicate>
    void erase_if(Predicate predicate) {
        count = static_cast<std::int32_t>(std::remove_if(begin(), end(), predicate) - begin());
    }
};

// The model itself. Holds scratch memory only; all state is in the flows.
class Model {
  public:
    explicit Model(double rate) : rate_(rate), ports_(kMaxPorts) {}

    // Moves flows from `now_ns` to `until_ns`, or to the `max_ends`-th end if that is earlier, and
    // returns the time reached. `live` holds the indices of the flows that have not ended; those
    // that end get their `end_ns` and leave it.
    double advance(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                   int max_ends = std::numeric_limits<int>::max());

    double rate() const noexcept { return rate_; }

  private:
    void share(std::span<Flow> flows, const Indices& live, double now_ns);

    // Used anew for each sharing.
    struct Port {
        double room;         // rate that is not given to a flow yet
        std::int32_t users;  // flows whose rate is not settled yet
        bool full;           // its users get no more than the present level
    };

    double rate_;
    std::vector<Port> ports_;
    std::vector<std::int32_t> used_;  // ports of live flows
    Indices open_;                    // flows whose rate is not settled yet
};

}  // namespace ficco::fluid
