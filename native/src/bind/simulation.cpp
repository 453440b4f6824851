// The simulation part of ficco._native. ficco/_native.pyi documents each call.
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
using CostsTuple = std::tuple<double, double, double, double, int, int>;

std::pair<Spans, StuckTuples> simulate(
    const Column<std::int64_t>& lanes, const Column<double>& starts,
    const Table<double, kRowFields>& rows, const Column<std::int64_t>& afters,
    const Table<double, kActionFields>& actions, const Table<double, kTransferFields>& transfers,
    const Table<std::int64_t, kWordFields>& words, const Table<std::int64_t, 3>& routes,
    const Column<std::int64_t>& kinds, const std::vector<std::vector<double>>& rates,
    const CostsTuple& costs) {
    static_assert(sizeof(SimulatedTimes) == 2 * sizeof(double));
    const auto [wait_ns, raise_ns, work_beside_copies, copies_beside_work, copy_engines, cores] =
        costs;
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
            {wait_ns, raise_ns, work_beside_copies, copies_beside_work, copy_engines, cores});
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
    module.def("simulate", &simulate, "lanes"_a, "starts"_a, "rows"_a, "afters"_a, "actions"_a,
               "transfers"_a, "words"_a, "routes"_a, "kinds"_a, "rates"_a, "costs"_a);
}

}  // namespace ficco::bind
