// Kernels: host functions that a test gives, and the parameters that they take; and those that come
// as text.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "abi.hpp"

namespace ficco::driver_double {

using Shape = std::array<unsigned, 5>;  // grid, threads, bytes of shared memory

// Kernels whose text is known, and which the double does itself.
enum class Known { kNone, kStoring, kHolding, kOne };

struct Kernel {
    struct Parameter {
        std::size_t offset;
        std::size_t bytes;
    };
    std::vector<Parameter> parameters;
    HostKernel run;         // null where `known` says what it does
    ContextHandle context;  // in which alone it is known; null: in all
    Known known = Known::kNone;
};

class Kernels {
  public:
    static Kernels& get();  // lives until the process ends

    // Parameters lie as in C; what is as long as a tensor map is aligned as one.
    FunctionHandle add(std::span<const std::size_t> bytes, HostKernel run);
    // One whose text is known, with parameters of so many bytes.
    FunctionHandle add(Known known, std::span<const std::size_t> bytes, ContextHandle context);
    std::shared_ptr<const Kernel> find(FunctionHandle handle);

  private:
    FunctionHandle add(std::span<const std::size_t> bytes, Kernel kernel);

    std::mutex mutex_;
    std::map<FunctionHandle, std::shared_ptr<const Kernel>> kernels_;
};

}  // namespace ficco::driver_double
