// A fluid model of transfers that share links by max-min fairness. Numbers only: no clock, no
// thread.
//
// Each transfer is a flow through ports. All rates rise together; a flow keeps its rate when it
// reaches its own limit or when one of its ports is full, and the others continue (progressive
// filling). Rates change only when a flow starts or ends, so the model jumps from event to event.
// Paced links and the simulator use the same model.
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

inline constexpr int kMaxPorts = kMaxWorld * kMaxWorld;  // a separate link for each pair of ranks
inline constexpr int kMaxFlows = kMaxWorld * kMaxWorld;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

// Plain data, for use in shared memory. Times are in ns, rates in bytes per ns (GB/s).
struct Flow {
    std::int32_t ports[3];  // -1: none
    double start_ns;        // it uses no bandwidth before this time
    double left_bytes;
    double limit;  // its highest rate; kNever: only its ports limit it
    double rate;
    double end_ns;  // kNever until the flow has ended
};

// Indices of flows. Also plain data of a fixed size.
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

// The model itself. It has only scratch memory; all state is in the flows.
class Model {
  public:
    // All ports have the same rate for any number of flows.
    explicit Model(double rate) : Model(std::vector<std::int32_t>(kMaxPorts, 0), {{rate}}) {}

    // rates[kinds[port]][n - 1] is the total rate of n flows through a port; the last entry also
    // holds for more flows. All rates are above 0.
    Model(std::vector<std::int32_t> kinds, std::vector<std::vector<double>> rates)
        : kinds_(std::move(kinds)), rates_(std::move(rates)), ports_(kinds_.size()) {}

    // Advances flows from `now_ns` to `until_ns`, or to the `max_ends`-th end if that is earlier,
    // and returns the time reached. `live` holds the indices of the flows that have not ended;
    // flows that end get their `end_ns` and are removed from it.
    double advance(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                   int max_ends = std::numeric_limits<int>::max());

    // The steps of `advance`. `share` sets the rates of all flows that have started; `next` returns
    // the next start or end at these rates; `move` advances up to that time and moves flows that
    // have ended from `live` to `ended`.
    void share(std::span<Flow> flows, const Indices& live, double now_ns);
    static double next(std::span<const Flow> flows, const Indices& live, double now_ns);
    static void move(std::span<Flow> flows, Indices& live, double now_ns, double until_ns,
                     Indices& ended);

    // The rate of a single flow through the first port.
    double rate() const noexcept { return rates_[0][0]; }

  private:
    // Scratch of `share`.
    struct Port {
        double room;             // rate that is not assigned yet
        std::int32_t users;      // number of flows without a final rate
        std::size_t first, end;  // all its flows, in `users_`
    };

    Port& port(std::int32_t number) { return ports_[static_cast<std::size_t>(number)]; }
    double prepare(std::span<Flow> flows, const Indices& live, double now_ns);

    std::vector<std::int32_t> kinds_;
    std::vector<std::vector<double>> rates_;
    std::vector<Port> ports_;
    std::vector<std::int32_t> used_;   // ports with several flows that are not full yet
    std::vector<std::int32_t> users_;  // flows, by port
    std::vector<double> most_;  // by flow: its limit, or the rate of a port that only it uses
    Indices open_;              // flows; those with a final rate are removed from time to time
    Indices ended_;
};

}  // namespace ficco::fluid
