// Facts of PyTorch's tensors, read by DLPack's C exchange API. ficco/_native.pyi documents each
// call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "tensor_facts.hpp"

namespace ficco::bind {

// The stable ABI of DLPack, major version 1: the functions in their order. `read` fills in a
// description that the object keeps alive. Functions that are not called have no types here.
struct ExchangeApi {
    std::uint32_t major, minor;
    const void* previous;
    void (*allocate)();
    void (*from_object)();
    void (*to_object)();
    int (*read)(void* object, nb::dlpack::dltensor* tensor);
    void (*stream)();
};

namespace {

using namespace nb::literals;

constexpr std::uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

const ExchangeApi* api_of(nb::handle tensor_type) {
    const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__");
    void* pointer = PyCapsule_GetPointer(capsule.ptr(), kCapsule);
    if (pointer == nullptr) throw nb::python_error();
    const auto* api = static_cast<const ExchangeApi*>(pointer);
    if (api->major != kMajor || api->read == nullptr) {
        throw std::runtime_error("DLPack " + std::to_string(api->major) + "." +
                                 std::to_string(api->minor) +
                                 " has no call that describes tensors");
    }
    return api;
}

}  // namespace

TensorReader::TensorReader(nb::type_object tensor, nb::type_object parameter)
    : api_(api_of(tensor)),
      tensor_(tensor),
      parameter_(parameter),
      is_negated_(nb::getattr(tensor, "is_neg")) {}

std::optional<nb::bytes> TensorReader::facts(nb::tuple tensors) const {
    std::vector<std::int64_t> facts;
    facts.reserve(kUsualFacts);
    for (const nb::handle tensor : tensors) {
        if (!add(tensor, facts)) return std::nullopt;
    }
    return bytes_of(facts);
}

bool TensorReader::add(nb::handle tensor, std::vector<std::int64_t>& facts) const {
    if (tensor.is_none()) {
        facts.push_back(kAbsent);
        return true;
    }
    const nb::handle type = tensor.type();
    if (!type.is(tensor_) && !type.is(parameter_)) return false;
    if (nb::cast<bool>(is_negated_(tensor))) return false;  // which DLPack cannot say
    nb::dlpack::dltensor found{};
    if (api_->read(tensor.ptr(), &found) != 0) {
        PyErr_Clear();
        return false;
    }
    if (found.ndim > 0 && (found.shape == nullptr || found.strides == nullptr)) return false;
    facts.push_back(found.ndim);
    facts.push_back((std::int64_t{found.device.device_type} << 32) | found.device.device_id);
    facts.push_back((std::int64_t{found.dtype.code} << 32) | (found.dtype.bits << 16) |
                    found.dtype.lanes);
    facts.insert(facts.end(), found.shape, found.shape + found.ndim);
    facts.insert(facts.end(), found.strides, found.strides + found.ndim);
    return true;
}

void bind_tensors(nb::module_& module) {
    nb::class_<TensorReader>(module, "TensorReader")
        .def(nb::init<nb::type_object, nb::type_object>(), "tensor"_a, "parameter"_a)
        .def("facts", &TensorReader::facts, "tensors"_a);
}

}  // namespace ficco::bind
