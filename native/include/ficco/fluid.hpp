// How transfers share links: a fluid model with max-min fairness. Numbers only: no clock, no
// thread.
//
// Each transfer is a flow through ports. The rates of all flows are raised together; a flow that
// reaches its own limit, and those of a port that is full, keep what they have and the others go on
// (progressive filling). Rates change only when a flow starts or ends, so the model jumps from
// event to event. Paced links and the simulator share it, so that they agree.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "ficco/limits.hpp"

namespace ficco::fluid {

inline constexpr int kMaxPorts = kMaxWorld * kMaxWorld;  // a link of its own for each pair of ranks
inline constexpr int kMaxFlows = kMaxWorld * kMaxWorld;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

// Plain data, so that it can lie in shared memory. Times are in ns, rates in bytes per ns (GB/s).
struct Flow {
    std::int32_t ports[3];  // -1: none
    double start_ns;        // before it no bandwidth is used
    double left_bytes;
    double limit;  // a rate that it never exceeds; kNever: its ports alone bound it
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
    // All ports carry as much, however many flows go through.
    explicit Model(double rate) : Model(std::vector<std::int32_t>(kMaxPorts, 0), {{rate}}) {}

    // rates[kinds[port]][n - 1] is what n flows get through a port together; more flows than there
    // are entries get the last one. All rates are above 0.
    Model(std::vector<std::int32_t> kinds, std::vector<std::vector<double>> rates)
        : kinds_(std::move(kinds)), rates_(std::move(rates)), ports_(kinds_.size()) {}

    // Moves flows from `now_ns` to `until_ns`, or to the `max_ends`-th end if that is earlier, and
    // returns the time reached. `live` holds the indices of the flows that have not ended; those
    // that end get their `end_ns` and leave it.
    double advance(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                   int max_ends = std::numeric_limits<int>::max());

    // What `advance` is made of. `share` sets the rates of all flows that have started; `next` is
    // when one starts or ends by them; `move` goes there, or less far, and adds to `ended` those
    // that have left `live`.
    void share(std::span<Flow> flows, const Indices& live, double now_ns);
    static double next(std::span<const Flow> flows, const Indices& live, double now_ns);
    static void move(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                     Indices& ended);

    // What one flow gets alone through the first port.
    double rate() const noexcept { return rates_[0][0]; }

  private:
    // Used anew for each sharing.
    struct Port {
        double room;             // rate that is not given to a flow yet
        std::int32_t users;      // flows whose rate is not settled yet
        std::size_t first, end;  // all its flows, in `users_`
    };

    Port& port(std::int32_t number) { return ports_[static_cast<std::size_t>(number)]; }
    double prepare(std::span<Flow> flows, const Indices& live, double now_ns);

    std::vector<std::int32_t> kinds_;
    std::vector<std::vector<double>> rates_;
    std::vector<Port> ports_;
    std::vector<std::int32_t> used_;   // ports of more than one flow that are not full yet
    std::vector<std::int32_t> users_;  // flows, port by port
    std::vector<double> most_;  // of each flow: its limit, or that of a port that it has for itself
    Indices open_;              // flows; settled ones are taken out now and then
    Indices ended_;
};

}  // namespace ficco::fluid
