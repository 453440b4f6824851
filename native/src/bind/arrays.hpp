// Common parts of the module: Python arrays, and objects whose destruction may take a while.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace ficco::bind {

namespace nb = nanobind;
using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

template <class Number, int Columns>
using Table = nb::ndarray<const Number, nb::shape<-1, Columns>, nb::c_contig, nb::device::cpu>;
template <class Number>
using Column = nb::ndarray<const Number, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 2>>;

template <class Array>
auto span_of(const Array& array) {
    return std::span(array.data(), array.size());
}

// Constructors and destructors do not use Python objects. They start and join threads, which may
// take as long as a wait, so they release the GIL.
struct DeleteWithoutGil {
    template <class Object>
    void operator()(Object* object) const {
        const nb::gil_scoped_release release;
        delete object;
    }
};

template <class Object, class... Arguments>
std::shared_ptr<Object> make(Arguments&&... arguments) {
    const nb::gil_scoped_release release;
    return {new Object(std::forward<Arguments>(arguments)...), DeleteWithoutGil{}};
}

// A stream by its handle.
inline void* stream_at(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

void bind_gpu(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_call_finder(nb::module_& module);  // after bind_tensors
void bind_call_steps(nb::module_& module);
void bind_prepared_call(nb::module_& module);  // after bind_gpu and bind_call_steps
void bind_driver_calls(nb::module_& module);   // this and the next after bind_gpu
void bind_hip(nb::module_& module);
void bind_simulation(nb::module_& module);

}  // namespace ficco::bind
