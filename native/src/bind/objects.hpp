// Python objects that repeated calls make and read, with few steps.
#pragma once

#include <nanobind/nanobind.h>

namespace ficco::bind {

namespace nb = nanobind;

inline bool is_true(nb::handle value) {
    const int answer = PyObject_IsTrue(value.ptr());
    if (answer < 0) throw nb::python_error();
    return answer != 0;
}

inline nb::object interned(const char* name) {
    nb::object found = nb::steal(PyUnicode_InternFromString(name));
    if (!found.is_valid()) throw nb::python_error();
    return found;
}

// A new tuple whose places are filled in order.
class NewTuple {
  public:
    explicit NewTuple(Py_ssize_t size) : tuple_(nb::steal(PyTuple_New(size))) {
        if (!tuple_.is_valid()) throw nb::python_error();
    }

    void add(nb::handle item) {
        if (PyTuple_SetItem(tuple_.ptr(), place_++, item.inc_ref().ptr()) != 0) {
            throw nb::python_error();
        }
    }
    nb::object get() const { return tuple_; }

  private:
    nb::object tuple_;
    Py_ssize_t place_ = 0;
};

}  // namespace ficco::bind
