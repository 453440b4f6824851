// Facts of PyTorch's tensors, read by DLPack's C exchange API.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ficco::bind {

namespace nb = nanobind;

struct ExchangeApi;

// ficco/_native.pyi documents the calls.
class TensorReader {
  public:
    TensorReader(nb::type_object tensor, nb::type_object parameter);

    std::optional<nb::bytes> facts(nb::tuple tensors) const;

    // Appends the facts of a tensor, or of None; false: there are none.
    bool add(nb::handle tensor, std::vector<std::int64_t>& facts) const;

  private:
    const ExchangeApi* api_;
    nb::type_object tensor_, parameter_;
    nb::object is_negated_;  // torch.Tensor.is_neg
};

constexpr std::int64_t kAbsent = -1;  // the fact of None: no number of dimensions

// The facts of a key: of four matrices 4 x (3 + 2 + 2), of three biases 3 x (3 + 1 + 1), and room.
constexpr std::size_t kUsualFacts = 48;

inline nb::bytes bytes_of(const std::vector<std::int64_t>& facts) {
    return nb::bytes(facts.data(), facts.size() * sizeof(std::int64_t));
}

}  // namespace ficco::bind
