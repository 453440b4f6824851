// The cached call of a function's arguments. ficco/_native.pyi documents the call.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "tensor_facts.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;

bool is_true(nb::handle value) {
    const int answer = PyObject_IsTrue(value.ptr());
    if (answer < 0) throw nb::python_error();
    return answer != 0;
}

class CallFinder {
  public:
    // What PyTorch says of a call's surroundings.
    struct Context {
        nb::tuple observers;   // return something true where a mode observes calls
        nb::dict forward;      // holds the level of forward-mode AD under `level`
        nb::object level;      // -1: it is not active
        nb::object recording;  // returns whether gradients are recorded
        nb::object group_of;   // returns the ProcessGroup of an argument
        nb::object automatic;  // the schedule that depends on captures
        nb::object capturing;  // returns whether the current stream is captured
    };

    CallFinder(TensorReader reader, nb::dict calls, std::size_t unordered, Context context)
        : reader_(std::move(reader)),
          calls_(std::move(calls)),
          unordered_(unordered),
          context_(std::move(context)) {}

    nb::object find(nb::handle op, nb::handle x, nb::handle w, nb::tuple absent, nb::handle group,
                    nb::handle schedule, nb::tuple rest, nb::handle grain) const {
        if (!grain.is_none() && grain.type().ptr() != reinterpret_cast<PyObject*>(&PyLong_Type)) {
            return nb::none();
        }
        try {
            if (is_observed(x, w) || !is_true(nb::getattr(x, "is_cuda"))) return nb::none();
            std::vector<std::int64_t> facts;
            facts.reserve(kUsualFacts);
            if (!reader_.add(x, facts) || !reader_.add(w, facts)) return nb::none();
            facts.insert(facts.end(), absent.size(), kAbsent);
            const bool is_automatic = schedule.equal(context_.automatic);
            const nb::object capturing = is_automatic ? context_.capturing() : nb::none();
            return cached(key(std::move(facts), op, context_.group_of(group), schedule, capturing,
                              rest, grain));
        } catch (nb::python_error& error) {  // the call finds it again, and says what is wrong
            if (!error.matches(PyExc_Exception)) throw;
            return nb::none();
        }
    }

  private:
    bool is_observed(nb::handle x, nb::handle w) const {
        for (const nb::handle observer : context_.observers) {
            if (is_true(observer())) return true;
        }
        if (nb::cast<std::int64_t>(context_.forward[context_.level]) >= 0) return true;
        if (!is_true(context_.recording())) return false;
        return is_true(nb::getattr(x, "requires_grad")) || is_true(nb::getattr(w, "requires_grad"));
    }

    // As call_cache.key_of makes it.
    static nb::object key(std::vector<std::int64_t> facts, nb::handle op, nb::handle group,
                          nb::handle schedule, nb::handle capturing, nb::tuple rest,
                          nb::handle grain) {
        const nb::object read = bytes_of(facts);
        const std::size_t more = rest.size();
        nb::object key = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(6 + more)));
        if (!key.is_valid()) throw nb::python_error();
        Py_ssize_t place = 0;
        const auto add = [&](nb::handle item) {
            if (PyTuple_SetItem(key.ptr(), place++, item.inc_ref().ptr()) != 0) {
                throw nb::python_error();
            }
        };
        for (const nb::handle item : {op, group, schedule, capturing, nb::handle(read)}) add(item);
        for (const nb::handle item : rest) add(item);
        add(grain);
        return key;
    }

    nb::object cached(const nb::object& key) const {
        PyObject* found = PyDict_GetItemWithError(calls_.ptr(), key.ptr());
        if (found == nullptr) {
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
            return nb::none();
        }
        const nb::object call = nb::borrow(found);
        if (calls_.size() >= unordered_) calls_.attr("move_to_end")(key);
        return call;
    }

    TensorReader reader_;
    nb::dict calls_;
    std::size_t unordered_;
    Context context_;
};

}  // namespace

void bind_call_finder(nb::module_& module) {
    nb::class_<CallFinder>(module, "CallFinder")
        .def(nb::new_([](const TensorReader& reader, nb::dict calls, std::size_t unordered,
                         nb::tuple observers, nb::tuple forward, nb::object recording,
                         nb::object group_of, nb::tuple automatic) {
                 return new CallFinder(
                     reader, std::move(calls), unordered,
                     {std::move(observers), nb::cast<nb::dict>(forward[0]), forward[1],
                      std::move(recording), std::move(group_of), automatic[0], automatic[1]});
             }),
             "reader"_a, "calls"_a, "unordered"_a, "observers"_a, "forward"_a, "recording"_a,
             "group_of"_a, "automatic"_a)
        .def("find", &CallFinder::find, "op"_a, "x"_a.none(), "w"_a.none(), "absent"_a,
             "group"_a.none(), "schedule"_a.none(), "rest"_a, "grain"_a.none());
}

}  // namespace ficco::bind
