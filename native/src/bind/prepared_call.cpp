// A call of a bound GPU program that repeats with other matrices of the same layout.
// ficco/_native.pyi documents the calls.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "call_steps.hpp"
#include "ficco/gpu_program.hpp"
#include "objects.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;
using Program = std::shared_ptr<GpuProgram>;

// Puts a stream behind the last call, for products of the next. If no launch follows, later calls
// wait for the products.
class Products {
  public:
    Products(GpuProgram& program, GpuStream stream) : program_(program), stream_(stream) {}
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;
    ~Products() {
        if (!follows_) return;
        const nb::gil_scoped_release release;
        try {
            program_.end(stream_);
        } catch (const std::exception&) {
            // the device is lost
        }
    }

    bool follow() {
        const nb::gil_scoped_release release;
        follows_ = program_.follow(stream_);
        return follows_;
    }
    bool follows() const noexcept { return follows_; }
    void launched() noexcept { follows_ = false; }

  private:
    GpuProgram& program_;
    GpuStream stream_;
    bool follows_ = false;
};

template <class Call>
auto without_gil(const Call& call) {
    const nb::gil_scoped_release release;
    return call();
}

class PreparedCall {
  public:
    // The slots of the matrices and then of the workspaces, -1: none; all pitches; the slots of
    // rows with an element per lookup, and the bytes of an element.
    using Slots = std::tuple<std::vector<int>, std::vector<std::int64_t>,
                             std::vector<std::pair<std::size_t, std::int64_t>>>;

    // The library's products by window copy, and whether one is stored in a result.
    struct Leader {
        nb::tuple keep;  // of the Python objects of `steps`
        const CallSteps* steps[2];
        bool stores_results;
    };

    // Where the library's work of a segment ends.
    struct Work {
        std::size_t end;  // the number of steps until then
        int mark;         // the row to mark as enqueued, or -1
    };

    // The library's work between native launches.
    struct Between {
        nb::tuple keep;
        const CallSteps* steps[2];
        std::vector<std::optional<Work>> segments;  // none: native code launches it
    };

    PreparedCall(Program program, Slots slots, nb::tuple state, nb::list workspaces,
                 nb::handle leader, nb::handle between)
        : program_(std::move(program)), launches_(state[0]), state_(state[1]) {
        if (!program_) throw std::invalid_argument("a prepared call needs a program");
        for (const nb::handle each : workspaces) workspaces_.push_back(nb::borrow(each));
        std::tie(slots_, pitches_, rows_) = std::move(slots);
        addresses_.resize(pitches_.size());
        const auto has_pitch = [this](std::int64_t slot) {
            if (slot < static_cast<std::int64_t>(pitches_.size())) return;
            throw std::invalid_argument("slot " + std::to_string(slot) + " has no pitch");
        };
        for (const int slot : slots_) has_pitch(slot);
        for (const auto& [slot, bytes] : rows_) has_pitch(static_cast<std::int64_t>(slot));
        if (slots_.size() < workspaces_.size() ||
            std::any_of(slots_.end() - static_cast<std::ptrdiff_t>(workspaces_.size()),
                        slots_.end(), [](int slot) { return slot < 0; })) {
            throw std::invalid_argument("a workspace has no slot");
        }
        if (!leader.is_none()) {
            const nb::tuple steps = nb::borrow<nb::tuple>(nb::object(leader[0]));
            leader_ = {steps, {steps_at(steps, 0), steps_at(steps, 1)}, nb::cast<bool>(leader[1])};
        }
        if (between.is_none()) return;
        if (leader_) {
            throw std::invalid_argument("a call with a leader has launches alone behind it");
        }
        between_ = between_of(between);
    }

    nb::object run(nb::handle inputs, nb::handle results, int copy, std::uintptr_t stream,
                   nb::handle lengths) {
        begun_ = false;
        if (!is_valid()) return nb::none();
        CallSteps::Values matrices;
        matrices.reserve(slots_.size());
        for (const nb::handle input : inputs) matrices.push_back(nb::borrow(input));
        if (between_) return run_by_segment(matrices, results, copy, stream_at(stream), lengths);
        const bool late = leader_ && !leader_->stores_results;
        nb::object made;
        if (!late) made = allocated(results, leader_.has_value(), matrices);
        Products products(*program_, stream_at(stream));
        if (leader_) {
            if (!products.follow()) return nb::none();
            begun_ = true;
            enqueue(copy, matrices);
            begun_ = false;
        }
        if (late) made = allocated(results, false, matrices);
        set_lengths(lengths);
        place(matrices);
        begun_ = true;  // until the caller has the results: a signal may raise an exception first
        const nb::list workspaces = place_workspaces(matrices.size());
        if (!launch(copy, stream_at(stream), products.follows())) {
            begun_ = false;
            return nb::none();
        }
        products.launched();
        return made;
    }

    bool is_valid() const { return nb::getattr(launches_, names_.state).is(state_); }
    bool begun() const noexcept { return begun_; }

  private:
    static const CallSteps* steps_at(const nb::tuple& steps, std::size_t copy) {
        return &nb::cast<const CallSteps&>(nb::object(steps[copy]));
    }

    Between between_of(nb::handle between) const {
        const nb::tuple steps = nb::borrow<nb::tuple>(nb::object(between[0]));
        Between found{steps, {steps_at(steps, 0), steps_at(steps, 1)}, {}};
        for (const CallSteps* of_copy : found.steps) {
            if (of_copy->inputs() == slots_.size()) continue;
            throw std::invalid_argument(std::to_string(of_copy->inputs()) +
                                        " inputs of steps, but " + std::to_string(slots_.size()) +
                                        " matrices and workspaces");
        }
        std::size_t last = 0;
        for (const nb::handle work : nb::object(between[1])) {
            found.segments.emplace_back();
            if (work.is_none()) continue;
            const auto end = nb::cast<std::size_t>(nb::object(work[0]));
            if (end < last || end > found.steps[0]->count() || end > found.steps[1]->count()) {
                throw std::invalid_argument("a segment ends at step " + std::to_string(end));
            }
            found.segments.back() = Work{last = end, nb::cast<int>(nb::object(work[1]))};
        }
        return found;
    }

    // A call whose segments are submitted one by one, with the library's work between them.
    nb::object run_by_segment(CallSteps::Values& matrices, nb::handle results, int copy,
                              GpuStream stream, nb::handle lengths) {
        nb::object made = allocated(results, true, matrices);
        set_lengths(lengths);
        place(matrices);
        begun_ = true;  // until the caller has the results, as in `run`
        const nb::list workspaces = place_workspaces(matrices.size());
        for (const nb::handle workspace : workspaces) matrices.push_back(nb::borrow(workspace));
        const CallSteps& steps = *between_->steps[copy & 1];
        steps.begin(matrices);
        try {
            begun_ = without_gil(
                [&] { return program_->start_prepared(copy, stream, addresses_, pitches_); });
            if (!begun_) return nb::none();
            submit_segments(steps, matrices);
        } catch (...) {
            without_gil([&] { program_->abandon(); });
            throw;
        }
        return made;
    }

    void submit_segments(const CallSteps& steps, CallSteps::Values& values) const {
        std::size_t made = 0;
        int segment = 0;
        for (const std::optional<Work>& work : between_->segments) {
            without_gil([&] {
                program_->submit(segment);
                if (!work) program_->launch(segment);
            });
            if (work) {
                steps.make(values, made, work->end);
                made = work->end;
                if (work->mark >= 0) without_gil([&] { program_->mark(work->mark); });
            }
            ++segment;
        }
        without_gil([&] {
            program_->submit(segment);
            program_->finish();
        });
    }

    // Allocates the results: appends what has their addresses, and returns the tensors.
    nb::object allocated(nb::handle results, bool as_matrices, CallSteps::Values& matrices) const {
        const nb::object new_results = results[0], shape = results[1];
        const nb::list made = nb::cast<const CallSteps&>(new_results).run(no_inputs_);
        const bool shaped = as_matrices && !shape.is_none();
        const nb::list placed = shaped ? nb::cast<const CallSteps&>(shape).run(made) : made;
        for (const nb::handle matrix : placed) matrices.push_back(nb::borrow(matrix));
        return made;
    }

    void enqueue(int copy, const CallSteps::Values& matrices) const {
        const CallSteps& steps = *leader_->steps[copy & 1];
        if (matrices.size() > steps.inputs()) {
            throw std::invalid_argument(std::to_string(matrices.size()) + " matrices, not " +
                                        std::to_string(steps.inputs()));
        }
        CallSteps::Values values = matrices;
        values.resize(steps.inputs(), nb::none());  // results that are not allocated yet
        steps.make(values);
    }

    void set_lengths(nb::handle lengths) {
        if (rows_.empty()) return;
        std::size_t place = 0;  // a pitch says where the last bag ends
        for (const nb::handle length : lengths) {
            const auto& [slot, bytes] = rows_.at(place++);
            pitches_[slot] = nb::cast<std::int64_t>(length) * bytes;
        }
        if (place != rows_.size()) throw std::invalid_argument("a length is missing");
    }

    void place(const CallSteps::Values& matrices) {
        if (matrices.size() + workspaces_.size() != slots_.size()) {
            throw std::invalid_argument(std::to_string(matrices.size()) + " matrices, not " +
                                        std::to_string(slots_.size() - workspaces_.size()));
        }
        for (std::size_t place = 0; place < matrices.size(); ++place) {
            if (slots_[place] >= 0) set_address(place, matrices[place].attr(names_.data_ptr)());
        }
    }

    // Allocates the workspaces. Stream order protects their memory once the call is enqueued.
    nb::list place_workspaces(std::size_t first) {
        nb::list kept;
        for (const nb::object& allocate : workspaces_) {
            const nb::object both = allocate();
            kept.append(both[0]);
            set_address(first++, both[1]);
        }
        return kept;
    }

    void set_address(std::size_t place, const nb::object& address) {
        addresses_[static_cast<std::size_t>(slots_[place])] = nb::cast<std::uint64_t>(address);
    }

    bool launch(int copy, GpuStream stream, bool followed) {
        return without_gil([&] {
            try {
                return program_->call_prepared(copy, stream, addresses_, pitches_, followed);
            } catch (...) {
                program_->abandon();
                throw;
            }
        });
    }

    struct Names {
        nb::object state = interned("state"), data_ptr = interned("data_ptr");
    };

    Program program_;
    nb::object launches_, state_;
    std::vector<nb::object> workspaces_;  // functions that allocate one and say where
    std::optional<Leader> leader_;
    std::optional<Between> between_;
    std::vector<int> slots_;
    std::vector<std::int64_t> pitches_;
    std::vector<std::pair<std::size_t, std::int64_t>> rows_;
    std::vector<std::uint64_t> addresses_;
    Names names_;
    nb::tuple no_inputs_;
    bool begun_ = false;
};

}  // namespace

void bind_prepared_call(nb::module_& module) {
    nb::class_<PreparedCall>(module, "PreparedCall")
        .def(nb::init<Program, PreparedCall::Slots, nb::tuple, nb::list, nb::handle, nb::handle>(),
             "program"_a, "slots"_a, "state"_a, "workspaces"_a, "leader"_a.none(),
             "between"_a.none())
        .def("run", &PreparedCall::run, "inputs"_a, "results"_a, "copy"_a, "stream"_a, "lengths"_a)
        .def_prop_ro("is_valid", &PreparedCall::is_valid)
        .def_prop_ro("begun", &PreparedCall::begun);
}

}  // namespace ficco::bind
