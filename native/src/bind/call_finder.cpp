// The cached call of a function's arguments. ficco/_native.pyi documents the calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "environment.hpp"
#include "tensor_facts.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;

bool is_true(nb::handle value) {
    const int answer = PyObject_IsTrue(value.ptr());
    if (answer < 0) throw nb::python_error();
    return answer != 0;
}

bool is_int(nb::handle value) { return PyLong_CheckExact(value.ptr()); }

bool has(nb::tuple names, nb::handle name) {
    for (const nb::handle each : names) {
        if (each.is(name)) return true;
    }
    return false;
}

nb::object interned(const char* name) {
    nb::object found = nb::steal(PyUnicode_InternFromString(name));
    if (!found.is_valid()) throw nb::python_error();
    return found;
}

// The items of a list or a tuple, and of no derived type; nothing if it is neither, or if it has
// another size. Other threads may change a list meanwhile.
std::optional<std::vector<nb::object>> items_of(nb::handle row,
                                                std::optional<Py_ssize_t> size = std::nullopt) {
    const bool is_list = PyList_CheckExact(row.ptr());
    if (!is_list && !PyTuple_CheckExact(row.ptr())) return std::nullopt;
    const Py_ssize_t found = is_list ? PyList_Size(row.ptr()) : PyTuple_Size(row.ptr());
    if (found != size.value_or(found)) return std::nullopt;
    std::vector<nb::object> items;
    items.reserve(static_cast<std::size_t>(found));
    for (Py_ssize_t place = 0; place < found; ++place) {
        PyObject* item =
            is_list ? PyList_GetItem(row.ptr(), place) : PyTuple_GetItem(row.ptr(), place);
        if (item == nullptr) {
            PyErr_Clear();
            return std::nullopt;
        }
        items.push_back(nb::borrow(item));
    }
    return items;
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

std::optional<nb::object> flat_table(nb::handle table) {
    const auto rows = items_of(table);
    if (!rows) return std::nullopt;
    const auto size = static_cast<Py_ssize_t>(rows->size());
    std::vector<nb::object> sizes;
    for (const nb::object& row : *rows) {
        const auto items = items_of(row, size);
        if (!items || !std::all_of(items->begin(), items->end(), is_int)) return std::nullopt;
        sizes.insert(sizes.end(), items->begin(), items->end());
    }
    NewTuple flat(size * size);
    for (const nb::object& item : sizes) flat.add(item);
    return flat.get();
}

class CallFinder {
  public:
    // What PyTorch says of a call's surroundings.
    struct Context {
        std::string off;       // an environment variable that turns ficco off
        nb::tuple observers;   // return something true where a mode observes calls
        nb::dict forward;      // holds the level of forward-mode AD under `level`
        nb::object level;      // -1: it is not active
        nb::object recording;  // returns whether gradients are recorded
        nb::object everyone;   // the class whose attribute WORLD is the group of all ranks
        nb::object group_of;   // returns the ProcessGroup of an argument
        nb::object automatic;  // the schedule that depends on captures
        nb::object capturing;  // returns whether the current stream is captured
    };

    CallFinder(TensorReader reader, nb::dict calls, std::size_t unordered, Context context)
        : reader_(std::move(reader)),
          calls_(std::move(calls)),
          unordered_(unordered),
          context_(std::move(context)) {}

    nb::object find(nb::tuple form, nb::tuple args, nb::dict words) const {
        try {
            const Form known(form);
            std::optional<Options> options = options_of(known, args, words);
            if (!options || is_set(context_.off.c_str())) return nb::none();
            const nb::handle x = args[0], w = args[1];
            if (is_observed(x, w) || !is_true(nb::getattr(x, "is_cuda"))) return nb::none();
            std::vector<std::int64_t> facts;
            facts.reserve(kUsualFacts);
            if (!reader_.add(x, facts) || !reader_.add(w, facts)) return nb::none();
            facts.insert(facts.end(), known.absent, kAbsent);
            const nb::object group = group_of(options->group);
            if (group.is_none()) return nb::none();
            return cached(key(known, *options, group, bytes_of(facts)));
        } catch (nb::python_error& error) {  // the call finds it again, and says what is wrong
            if (!error.matches(PyExc_Exception)) throw;
            return nb::none();
        }
    }

  private:
    // The fields of `ficco.modules.dispatching.Form`.
    struct Form {
        explicit Form(nb::tuple form)
            : op(form[0]),
              absent(nb::cast<std::size_t>(form[1])),
              rest(form[2]),
              unset(form[3]),
              flags(form[4]),
              table(form[5]) {}

        nb::object op;
        std::size_t absent;
        nb::tuple rest, unset, flags;
        nb::object table;
    };

    struct Options {
        nb::handle group, schedule, grain;
        nb::object table;  // not valid: the function has none
    };

    // What a call says besides its tensors; nothing where it needs the whole call.
    std::optional<Options> options_of(const Form& form, nb::tuple args, nb::dict words) const {
        Options found{nb::none(), context_.automatic, nb::none(), {}};
        nb::handle table;
        const bool has_table = !form.table.is_none();
        if (args.size() == 3 && has_table) {
            table = args[2];
        } else if (args.size() != 2) {
            return std::nullopt;
        }
        for (const auto [name, value] : words) {
            if (name.is(group_)) {
                found.group = value;
            } else if (name.is(schedule_)) {
                found.schedule = value;
            } else if (name.is(grain_)) {
                found.grain = value;
            } else if (has_table && name.is(form.table) && args.size() == 2) {
                table = value;
            } else if (has(form.unset, name)) {
                if (!value.is_none()) return std::nullopt;
            } else if (has(form.flags, name)) {
                if (!PyBool_Check(value.ptr())) return std::nullopt;
            } else {
                return std::nullopt;
            }
        }
        if (!found.grain.is_none() && !is_int(found.grain)) return std::nullopt;
        if (!has_table) return found;
        if (!table.is_valid()) return std::nullopt;
        std::optional<nb::object> flat = flat_table(table);
        if (!flat) return std::nullopt;
        found.table = std::move(*flat);
        return found;
    }

    bool is_observed(nb::handle x, nb::handle w) const {
        for (const nb::handle observer : context_.observers) {
            if (is_true(observer())) return true;
        }
        if (nb::cast<std::int64_t>(context_.forward[context_.level]) >= 0) return true;
        if (!is_true(context_.recording())) return false;
        return is_true(nb::getattr(x, "requires_grad")) || is_true(nb::getattr(w, "requires_grad"));
    }

    nb::object group_of(nb::handle group) const {
        if (group.is_none()) return nb::getattr(context_.everyone, world_);
        return context_.group_of(group);
    }

    // As call_cache.key_of makes it.
    nb::object key(const Form& form, const Options& options, nb::handle group,
                   const nb::object& facts) const {
        const bool is_automatic = options.schedule.equal(context_.automatic);
        const nb::object capturing = is_automatic ? context_.capturing() : nb::none();
        const std::size_t table = options.table.is_valid() ? 1 : 0;
        NewTuple key(static_cast<Py_ssize_t>(6 + form.rest.size() + table));
        for (const nb::handle item : {nb::handle(form.op), group, options.schedule,
                                      nb::handle(capturing), nb::handle(facts)}) {
            key.add(item);
        }
        for (const nb::handle item : form.rest) key.add(item);
        if (table != 0) key.add(options.table);
        key.add(options.grain);
        return key.get();
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
    nb::object group_ = interned("group"), schedule_ = interned("schedule"),
               grain_ = interned("grain"), world_ = interned("WORLD");
};

}  // namespace

void bind_call_finder(nb::module_& module) {
    module.def(
        "flat_table", [](nb::handle table) { return flat_table(table).value_or(nb::none()); },
        "table"_a.none());
    nb::class_<CallFinder>(module, "CallFinder")
        .def(nb::new_([](const TensorReader& reader, nb::tuple calls, std::string off,
                         nb::tuple observers, nb::tuple forward, nb::object recording,
                         nb::tuple group_of, nb::tuple automatic) {
                 return new CallFinder(
                     reader, nb::cast<nb::dict>(calls[0]), nb::cast<std::size_t>(calls[1]),
                     {std::move(off), std::move(observers), nb::cast<nb::dict>(forward[0]),
                      forward[1], std::move(recording), group_of[0], group_of[1], automatic[0],
                      automatic[1]});
             }),
             "reader"_a, "calls"_a, "off"_a, "observers"_a, "forward"_a, "recording"_a,
             "group_of"_a, "automatic"_a)
        .def("find", &CallFinder::find, "form"_a, "args"_a, "words"_a);
}

}  // namespace ficco::bind
