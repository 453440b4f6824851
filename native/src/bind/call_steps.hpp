// Calls of Python functions in order, as data.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <vector>

namespace ficco::bind {

namespace nb = nanobind;

// ficco/_native.pyi documents the calls.
class CallSteps {
  public:
    using Values = std::vector<nb::object>;

    // `more`: the values after the inputs; None for those that steps store.
    CallSteps(std::size_t inputs, nb::list more, nb::list steps, std::vector<int> results);

    nb::list run(nb::handle inputs) const;
    // Makes the calls. There are as many inputs as were announced.
    void make(Values& values) const;
    // The same in parts: first the values after the inputs, then the steps from `first` to `end`.
    void begin(Values& values) const;
    void make(Values& values, std::size_t first, std::size_t end) const;

    std::size_t inputs() const noexcept { return inputs_; }
    std::size_t count() const noexcept { return steps_.size(); }

  private:
    struct Step {
        nb::object function;
        std::vector<int> arguments;
        int result, out;
        bool waits;
        nb::object get, assign;     // of the setting; not valid: there is none
        std::vector<int> released;  // places that no later step reads
    };

    Step step_of(nb::handle step) const;
    int checked(int place, int least) const;
    void release_early();
    nb::object call(const Step& step, const Values& values) const;
    nb::object call_without(const Step& step, const Values& values) const;

    std::size_t inputs_;
    Values more_;
    std::vector<Step> steps_;
    std::vector<int> results_;
    nb::object out_, wait_;  // names
};

}  // namespace ficco::bind
