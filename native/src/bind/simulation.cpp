// The part of ficco._native that predicts. What each call promises is in ficco/_native.pyi.
#include "ficco/simulation.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;
using Spans = nb::ndarray<nb::numpy, double, nb::shape<-1, 2>>;
using StuckTuples = std::vector<std::tuple<int, int, int>>;  // row, word, row it comes after

using PlanTuple = std::tuple<Column<std::int64_t>, Column<double>, Table<double, kRowFields>,
                             Column<std::int64_t>, Table<double, kActionFields>,
                             Table<double, kTransferFields>, Table<std::int64_t, kWordFields>>;
using LinksTuple =
    std::tuple<Table<std::int64_t, 3>, Column<std::int64_t>, std::vector<std::vector<double>>>;
using CostsTuple = std::tuple<double, double, double, double, int>;

std::pair<Spans, StuckTuples> simulate(const PlanTuple& plan, const LinksTuple& links,
                                       const CostsTuple& costs) {
    static_assert(sizeof(SimulatedTimes) == 2 * sizeof(double));
    const auto& [lanes, starts, rows, afters, actions, transfers, words] = plan;
    const auto& [routes, kinds, rates] = links;
    const auto [wait_ns, raise_ns, work_beside_copies, copies_beside_work, copy_engines] = costs;
    auto* times = new std::vector<SimulatedTimes>();
    const nb::capsule owner(times,
                            [](void* data) noexcept { delete static_cast<decltype(times)>(data); });
    StuckTuples stuck;
    {
        const nb::gil_scoped_release release;
        Simulation simulation(
            {span_of(lanes), span_of(starts), span_of(rows), span_of(afters), span_of(actions),
             span_of(transfers), span_of(words)},
            {span_of(routes), span_of(kinds), rates},
            {wait_ns, raise_ns, work_beside_copies, copies_beside_work, copy_engines});
        simulation.run();
        *times = simulation.times();
        for (const Stuck& each : simulation.stuck()) {
            stuck.emplace_back(each.row, each.word, each.after);
        }
    }
    return {Spans(times->data(), {times->size(), 2}, owner), std::move(stuck)};
}

}  // namespace

void bind_simulation(nb::module_& module) {
    module.def("simulate", &simulate, "plan"_a, "links"_a, "costs"_a);
}

}  // namespace ficco::bind
