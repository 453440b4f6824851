// ficco._native: names and argument types for Python, and where the GIL is released. No logic.
// ficco/_native.pyi documents each call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "environment.hpp"
#include "ficco/clock.hpp"
#include "ficco/fabric.hpp"
#include "ficco/group.hpp"
#include "ficco/interrupt.hpp"
#include "ficco/limits.hpp"
#include "ficco/program.hpp"
#include "ficco/shared.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ficco::Fabric;
using ficco::Group;
using ficco::Program;
using namespace ficco::bind;

using FailureTuple =
    std::tuple<int, int, int, int, std::string_view, double, std::uint32_t, std::uint32_t>;

std::optional<FailureTuple> failure_tuple(const Group& group) {
    const auto failure = group.failure();
    if (!failure) return std::nullopt;
    constexpr std::string_view kinds[] = {"timeout", "stopped", "differs", "refused"};
    return FailureTuple{failure->rank,
                        failure->step,
                        failure->word_rank,
                        failure->word_index,
                        kinds[static_cast<int>(failure->kind)],
                        failure->seconds,
                        failure->found,
                        failure->expected};
}

using StateTuple = std::tuple<std::string_view, double, std::uint32_t, std::uint32_t, bool>;

StateTuple state_tuple(const Group& group, int rank) {
    constexpr std::string_view names[] = {"absent", "here", "closed", "died"};
    const ficco::RankState state = group.state(rank);
    return {names[static_cast<int>(state.presence)], state.age_s, state.calls, state.digest,
            state.preparing};
}

// Runs the handlers of signals that Python has got. Returns whether one has raised an exception.
bool handler_raised() noexcept {
    const nb::gil_scoped_acquire acquire;
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

// Python runs handlers on the main thread alone. Other threads must not ask: while the process
// ends, they would not get the GIL back.
bool on_main_thread() noexcept { return ::syscall(SYS_gettid) == ::getpid(); }

// Work without the GIL. On the main thread its waits end when the handler of a signal raises an
// exception, which is then raised here.
template <class Work>
bool interruptible(const Work& work) {
    bool done = false;
    {
        const nb::gil_scoped_release release;
        const ficco::InterruptScope scope(on_main_thread() ? &handler_raised : nullptr);
        done = work();
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return done;
}

Times times_of(const Program& program) {
    static_assert(sizeof(ficco::StepTimes) == 2 * sizeof(std::int64_t));
    auto* times = new std::vector<ficco::StepTimes>(static_cast<std::size_t>(program.steps()));
    const nb::capsule owner(times,
                            [](void* data) noexcept { delete static_cast<decltype(times)>(data); });
    program.times(*times);
    return Times(times->data(), {times->size(), 2}, owner);
}

void bind_fabric(nb::module_& module) {
    nb::class_<Fabric>(module, "Fabric")
        .def(nb::new_(&make<Fabric, int, std::string_view, double>), "world"_a, "per"_a, "gbps"_a)
        .def_prop_ro("world", &Fabric::world)
        .def_prop_ro("per",
                     [](const Fabric& fabric) {
                         return fabric.per() == Fabric::Per::pair ? "pair" : "port";
                     })
        .def_prop_ro("gbps", &Fabric::gbps);
}

void bind_group(nb::module_& module) {
    nb::class_<Group>(module, "Group")
        .def(nb::new_(&make<Group, int, double, std::shared_ptr<Fabric>>), "world"_a, "timeout_s"_a,
             "fabric"_a.none())
        .def_prop_ro("world", &Group::world)
        .def_prop_ro("capacity", &Group::capacity)
        .def_prop_rw("timeout_s", &Group::timeout_s, &Group::set_timeout_s)
        .def("grow", &Group::grow, "data_bytes"_a, WithoutGil())
        .def(
            "window",
            [](const Group& group, int rank, int copy) {
                return reinterpret_cast<std::uintptr_t>(group.window(rank, copy));
            },
            "rank"_a, "copy"_a)
        .def(
            "word",
            [](const Group& group, int rank, int copy, int index) {
                return group.word(rank, copy, index).load(std::memory_order_acquire);
            },
            "rank"_a, "copy"_a, "index"_a)
        .def("fail", nb::overload_cast<int>(&Group::fail), "rank"_a)
        .def("failure", &failure_tuple)
        .def("set_preparing", &Group::set_preparing, "rank"_a, "does"_a)
        .def("refuse", &Group::refuse, "rank"_a, "reason"_a)
        .def("refusal", &Group::refusal, "rank"_a, "peer"_a)
        .def("last_refusal", &Group::last_refusal, "rank"_a)
        .def("refuses_next", &Group::refuses_next, "rank"_a, "peer"_a)
        .def("reset", &Group::reset, WithoutGil())
        .def("rank_state", &state_tuple, "rank"_a)
        .def("close", &Group::close, WithoutGil());
}

void bind_shared(nb::module_& module) {
    module.def("available_bytes", &ficco::available_bytes, WithoutGil());
    module.def("create_memory", &ficco::create_memory, "world"_a, "data_bytes"_a, WithoutGil());
    module.def(
        "join_fabric",
        [](int memory, int world, std::string_view per, double gbps) {
            return make<Fabric>(memory, world, per, gbps);
        },
        "memory"_a, "world"_a, "per"_a, "gbps"_a);
    module.def(
        "join_group",
        [](int memory, int world, int rank, std::size_t data_bytes, double timeout_s,
           std::shared_ptr<Fabric> fabric) {
            return make<Group>(ficco::Membership{memory, world, rank, data_bytes}, timeout_s,
                               std::move(fabric));
        },
        "memory"_a, "world"_a, "rank"_a, "data_bytes"_a, "timeout_s"_a, "fabric"_a.none());
}

void bind_program(nb::module_& module) {
    const auto bind = [](std::shared_ptr<Group> group, int rank,
                         const Table<std::int64_t, ficco::kOpFields>& ops,
                         const Table<std::int64_t, ficco::kWindowSlotFields>& window_slots,
                         int segments, int steps, int slots) {
        return make<Program>(
            std::move(group),
            ficco::Binding{rank, span_of(ops), span_of(window_slots), segments, steps, slots});
    };
    const auto start = [](Program& program, int copy, std::uint32_t digest, const auto& addresses,
                          const auto& pitches) {
        program.start(copy, digest, span_of(addresses), span_of(pitches));
    };
    nb::class_<Program>(module, "Program")
        .def(nb::new_(bind), "group"_a, "rank"_a, "ops"_a, "window_slots"_a, "segments"_a,
             "steps"_a, "slots"_a)
        .def(
            "start",
            [start](Program& program, int copy, std::uint32_t digest,
                    const Column<std::uint64_t>& addresses, const Column<std::int64_t>& pitches) {
                start(program, copy, digest, addresses, pitches);
            },
            "copy"_a, "digest"_a, "addresses"_a, "pitches"_a)
        .def(
            "start",
            [start](Program& program, int copy, std::uint32_t digest,
                    const std::vector<std::uint64_t>& addresses,
                    const std::vector<std::int64_t>& pitches) {
                start(program, copy, digest, addresses, pitches);
            },
            "copy"_a, "digest"_a, "addresses"_a, "pitches"_a)
        .def(
            "submit",
            [](Program& program, int segment) {
                return interruptible([&] { return program.submit(segment); });
            },
            "segment"_a)
        .def_prop_ro("running", &Program::running)
        .def("mark", &Program::mark, "step"_a)
        .def("finish",
             [](Program& program) { return interruptible([&] { return program.finish(); }); })
        .def("times", &times_of);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // objects may still be alive when the process ends
    if (nb::type<Group>().is_valid()) {
        throw nb::import_error(
            "ficco was imported before in this process and then removed from sys.modules; its "
            "native code and PyTorch's operators are loaded once per process, so keep ficco's "
            "modules, or start a new process");
    }
    module.attr("MAX_WORLD") = ficco::kMaxWorld;
    module.attr("MAX_CHUNKS") = ficco::kMaxChunks;
    module.attr("MAX_LANES") = ficco::kMaxLanes;
    module.attr("WORDS_PER_COPY") = ficco::kWordsPerCopy;
    module.def("is_set", &ficco::bind::is_set, "name"_a);
    module.def("now_ns", &ficco::now_ns);
    module.def("sleep_until_ns", &ficco::sleep_until_ns, "t"_a, WithoutGil());
    bind_fabric(module);
    bind_group(module);
    bind_program(module);
    bind_shared(module);
    ficco::bind::bind_tensors(module);
    ficco::bind::bind_call_finder(module);
    ficco::bind::bind_call_steps(module);
    ficco::bind::bind_gpu(module);
    ficco::bind::bind_prepared_call(module);
    ficco::bind::bind_driver_calls(module);
    ficco::bind::bind_hip(module);
    ficco::bind::bind_simulation(module);
}
