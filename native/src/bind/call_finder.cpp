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
#include "objects.hpp"
#include "tensor_facts.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;

constexpr std::size_t kUsualTensors = 4;

bool is_int(nb::handle value) { return PyLong_CheckExact(value.ptr()); }

bool has(nb::tuple names, nb::handle name) {
    for (const nb::handle each : names) {
        if (each.is(name)) return true;
    }
    return false;
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
            const std::optional<Options> options = options_of(known, args, words);
            if (!options || is_set(context_.off.c_str())) return nb::none();
            const std::optional<Tensors> tensors = tensors_of(known, args, options->bias);
            if (!tensors || is_observed(tensors->given)) return nb::none();
            if (!is_true(nb::getattr(tensors->given[0], is_cuda_))) return nb::none();
            std::vector<std::int64_t> facts;
            facts.reserve(kUsualFacts);
            for (const nb::object& tensor : tensors->given) {
                if (!reader_.add(tensor, facts)) return nb::none();
            }
            if (tensors->lacks_bias) facts.push_back(kAbsent);
            const nb::object group = group_of(options->group);
            if (group.is_none()) return nb::none();
            const nb::object call = cached(key(known, *options, *tensors, group, bytes_of(facts)));
            if (call.is_none()) return call;
            return nb::make_tuple(call, tuple_of(tensors->given), tensors->several);
        } catch (nb::python_error& error) {  // the call finds it again, and says what is wrong
            if (!error.matches(PyExc_Exception)) throw;
            return nb::none();
        }
    }

  private:
    // The fields of `ficco.api.call_cache.Form`.
    struct Form {
        explicit Form(nb::handle form)
            : op(at(form, 0)),
              several(at(form, 1).is(Py_True)),
              bias(at(form, 2).is(Py_True)),
              rest(nb::borrow<nb::tuple>(at(form, 3))),
              unset(nb::borrow<nb::tuple>(at(form, 4))),
              flags(nb::borrow<nb::tuple>(at(form, 5))),
              table(at(form, 6)) {}

        static nb::handle at(nb::handle form, Py_ssize_t place) {
            PyObject* item = PyTuple_GetItem(form.ptr(), place);
            if (item == nullptr) throw nb::python_error();
            return item;
        }

        nb::handle op;
        bool several, bias;
        nb::tuple rest, unset, flags;
        nb::handle table;
    };

    struct Options {
        nb::handle group, schedule, grain, bias;
        nb::object table;  // not valid: the function has none
    };

    struct Tensors {
        std::vector<nb::object> given;  // x, the weights, and the biases that there are
        nb::object biased;              // which weights have a bias; not valid: there are no lists
        bool lacks_bias;                // the key says so
        bool several;                   // the result is a tuple
    };

    // What a call says besides its tensors; nothing where it needs the whole call.
    std::optional<Options> options_of(const Form& form, nb::tuple args, nb::dict words) const {
        Options found{nb::none(), context_.automatic, nb::none(), nb::none(), {}};
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
            } else if (form.bias && name.is(bias_)) {
                found.bias = value;
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

    // As `ficco.api.arguments.weights_of` orders them; nothing where lists do not fit.
    std::optional<Tensors> tensors_of(const Form& form, nb::tuple args, nb::handle bias) const {
        Tensors found{{}, {}, false, false};
        found.given.reserve(kUsualTensors);
        found.given.push_back(args[0]);
        std::optional<std::vector<nb::object>> weights;
        if (form.several) weights = items_of(args[1]);
        if (!weights && (bias.is_none() || !form.several)) {
            found.given.push_back(args[1]);
            found.lacks_bias = form.bias && !form.several && bias.is_none();
            if (!bias.is_none()) found.given.push_back(nb::borrow(bias));
            if (form.several) found.biased = one_unbiased_;
            return found;
        }
        found.several = weights.has_value();
        if (!weights) weights.emplace({nb::borrow(args[1])});
        const auto count = static_cast<Py_ssize_t>(weights->size());
        std::optional<std::vector<nb::object>> biases = items_of(bias, count);
        if (!biases) {
            if (PyList_CheckExact(bias.ptr()) || PyTuple_CheckExact(bias.ptr()))
                return std::nullopt;
            biases.emplace(weights->size(), nb::borrow(bias));
        }
        NewTuple biased(count);
        found.given.insert(found.given.end(), weights->begin(), weights->end());
        for (const nb::object& each : *biases) {
            biased.add(nb::bool_(!each.is_none()));
            if (!each.is_none()) found.given.push_back(each);
        }
        found.biased = biased.get();
        return found;
    }

    static nb::object tuple_of(const std::vector<nb::object>& items) {
        NewTuple found(static_cast<Py_ssize_t>(items.size()));
        for (const nb::object& item : items) found.add(item);
        return found.get();
    }

    bool is_observed(const std::vector<nb::object>& tensors) const {
        for (const nb::handle observer : context_.observers) {
            if (is_true(observer())) return true;
        }
        if (nb::cast<std::int64_t>(context_.forward[context_.level]) >= 0) return true;
        return is_true(context_.recording()) &&
               std::any_of(tensors.begin(), tensors.end(), [this](const nb::object& tensor) {
                   return is_true(nb::getattr(tensor, requires_grad_));
               });
    }

    nb::object group_of(nb::handle group) const {
        if (group.is_none()) return nb::getattr(context_.everyone, world_);
        return context_.group_of(group);
    }

    // As call_cache.key_of makes it.
    nb::object key(const Form& form, const Options& options, const Tensors& tensors,
                   nb::handle group, const nb::object& facts) const {
        const bool is_automatic = options.schedule.equal(context_.automatic);
        const nb::object capturing = is_automatic ? context_.capturing() : nb::none();
        const std::size_t more = tensors.biased.is_valid() + options.table.is_valid();
        NewTuple key(static_cast<Py_ssize_t>(6 + form.rest.size() + more));
        for (const nb::handle item : {nb::handle(form.op), group, options.schedule,
                                      nb::handle(capturing), nb::handle(facts)}) {
            key.add(item);
        }
        if (tensors.biased.is_valid()) key.add(tensors.biased);
        for (const nb::handle item : form.rest) key.add(item);
        if (options.table.is_valid()) key.add(options.table);
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
    nb::object one_unbiased_ = nb::make_tuple(false);
    nb::object group_ = interned("group"), schedule_ = interned("schedule"),
               grain_ = interned("grain"), bias_ = interned("bias"), world_ = interned("WORLD"),
               is_cuda_ = interned("is_cuda"), requires_grad_ = interned("requires_grad");
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
