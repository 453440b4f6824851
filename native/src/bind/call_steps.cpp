// Calls of Python functions in order, as data. ficco/_native.pyi documents the calls.
#include "call_steps.hpp"

#include <nanobind/stl/vector.h>

#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "objects.hpp"

namespace ficco::bind {

using namespace nb::literals;

CallSteps::CallSteps(std::size_t inputs, nb::list more, nb::list steps, std::vector<int> results)
    : inputs_(inputs),
      results_(std::move(results)),
      out_(interned("out")),
      wait_(interned("wait")) {
    for (const nb::handle value : more) more_.push_back(nb::borrow(value));
    for (const nb::handle step : steps) steps_.push_back(step_of(step));
    for (const int place : results_) checked(place, 0);
    release_early();
}

int CallSteps::checked(int place, int least) const {
    const auto places = static_cast<int>(inputs_ + more_.size());
    if (place >= least && place < places) return place;
    throw std::invalid_argument("place " + std::to_string(place) + " is not in " +
                                std::to_string(least) + " to " + std::to_string(places - 1));
}

// The fields of `ficco.engine.repeated_calls.Step`.
CallSteps::Step CallSteps::step_of(nb::handle step) const {
    Step found{step[0],
               nb::cast<std::vector<int>>(step[1]),
               checked(nb::cast<int>(step[2]), -1),
               checked(nb::cast<int>(step[3]), -1),
               nb::cast<bool>(step[4]),
               {},
               {},
               {}};
    for (const int place : found.arguments) checked(place, 0);
    const nb::object setting = step[5];
    if (!setting.is_none()) {
        found.get = setting[0];
        found.assign = setting[1];
    }
    return found;
}

// Memory of values that no later step reads is free for the steps after.
void CallSteps::release_early() {
    std::set<int> kept(results_.begin(), results_.end());
    for (int place = 0; place < static_cast<int>(inputs_); ++place) kept.insert(place);
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
        std::vector<int> places = step->arguments;
        if (step->out >= 0) places.push_back(step->out);
        if (step->result >= 0) places.push_back(step->result);
        for (const int place : places) {
            if (kept.insert(place).second) step->released.push_back(place);
        }
    }
}

nb::list CallSteps::run(nb::handle inputs) const {
    Values values;
    values.reserve(inputs_ + more_.size());
    for (const nb::handle input : inputs) values.push_back(nb::borrow(input));
    if (values.size() != inputs_) {
        throw std::invalid_argument(std::to_string(values.size()) + " inputs, not " +
                                    std::to_string(inputs_));
    }
    make(values);
    nb::list results;
    for (const int place : results_) results.append(values[static_cast<std::size_t>(place)]);
    return results;
}

void CallSteps::begin(Values& values) const {
    values.insert(values.end(), more_.begin(), more_.end());
}

void CallSteps::make(Values& values) const {
    begin(values);
    make(values, 0, steps_.size());
}

void CallSteps::make(Values& values, std::size_t first, std::size_t end) const {
    for (std::size_t number = first; number < end; ++number) {
        const Step& step = steps_[number];
        nb::object made = step.get.is_valid() ? call_without(step, values) : call(step, values);
        if (step.waits && !made.is_none()) made.attr(wait_)();
        if (step.result >= 0) values[static_cast<std::size_t>(step.result)] = std::move(made);
        for (const int place : step.released) values[static_cast<std::size_t>(place)].reset();
    }
}

nb::object CallSteps::call(const Step& step, const Values& values) const {
    NewTuple arguments(static_cast<Py_ssize_t>(step.arguments.size()));
    for (const int place : step.arguments) arguments.add(values[static_cast<std::size_t>(place)]);
    nb::object words;
    if (step.out >= 0) {
        words = nb::dict();
        words[out_] = values[static_cast<std::size_t>(step.out)];
    }
    PyObject* made = PyObject_Call(step.function.ptr(), arguments.get().ptr(), words.ptr());
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
}

// Calls while the setting is off.
nb::object CallSteps::call_without(const Step& step, const Values& values) const {
    const nb::object found = step.get();
    const nb::tuple before =
        PyTuple_Check(found.ptr()) ? nb::borrow<nb::tuple>(found) : nb::make_tuple(found);
    if (!is_true(before[0])) return call(step, values);
    NewTuple off(static_cast<Py_ssize_t>(before.size()));
    off.add(nb::handle(Py_False));
    for (std::size_t place = 1; place < before.size(); ++place) off.add(before[place]);
    const auto assign = [&](nb::handle setting) {
        const nb::object done = nb::steal(PyObject_Call(step.assign.ptr(), setting.ptr(), nullptr));
        if (!done.is_valid()) throw nb::python_error();
    };
    assign(off.get());
    try {
        nb::object made = call(step, values);
        assign(before);
        return made;
    } catch (...) {
        assign(before);
        throw;
    }
}

void bind_call_steps(nb::module_& module) {
    nb::class_<CallSteps>(module, "CallSteps")
        .def(nb::init<std::size_t, nb::list, nb::list, std::vector<int>>(), "inputs"_a, "more"_a,
             "steps"_a, "results"_a)
        .def("run", &CallSteps::run, "inputs"_a);
}

}  // namespace ficco::bind
