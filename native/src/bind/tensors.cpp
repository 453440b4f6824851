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

namespace ficco::bind {

namespace {

using namespace nb::literals;

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

class TensorReader {
  public:
    TensorReader(nb::type_object tensor, nb::type_object parameter)
        : api_(api_of(tensor)),
          tensor_(tensor),
          parameter_(parameter),
          is_negated_(nb::getattr(tensor, "is_neg")) {}

    std::optional<nb::bytes> facts(nb::tuple tensors) const {
        constexpr std::size_t kNumbers = 32;  // of two matrices: 2 x (3 + 2 + 2), and room
        std::vector<std::int64_t> facts;
        facts.reserve(kNumbers);
        for (const nb::handle tensor : tensors) {
            if (tensor.is_none()) {
                facts.push_back(-1);  // no number of dimensions
            } else if (!add(tensor, facts)) {
                return std::nullopt;
            }
        }
        return nb::bytes(facts.data(), facts.size() * sizeof(std::int64_t));
    }

  private:
    bool add(nb::handle tensor, std::vector<std::int64_t>& facts) const {
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

    const ExchangeApi* api_;
    nb::type_object tensor_, parameter_;
    nb::object is_negated_;  // torch.Tensor.is_neg
};

}  // namespace

void bind_tensors(nb::module_& module) {
    nb::class_<TensorReader>(module, "TensorReader")
        .def(nb::init<nb::type_object, nb::type_object>(), "tensor"_a, "parameter"_a)
        .def("facts", &TensorReader::facts, "tensors"_a);
}

}  // namespace ficco::bind
