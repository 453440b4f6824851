// Kernels: host functions of a test with their parameters, and kernels that are passed as PTX.
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

// Kernels with known PTX, which the double implements itself.
enum class Known { kNone, kStoring, kAwaiting, kHolding, kComparing, kOne };

struct Kernel {
    struct Parameter {
        std::size_t offset;
        std::size_t bytes;
    };
    std::vector<Parameter> parameters;
    HostKernel run;         // null where `known` says what it does, or nothing stands for it
    ContextHandle context;  // in which alone it is known; null: in all
    Known known = Known::kNone;
    bool code = false;               // it comes as a cubin
    unsigned most_shared_bytes = 0;  // that launches may ask for; of a cubin alone
};

class Kernels {
  public:
    static Kernels& get();  // lives until the process ends

    // Parameters have the C layout; those with the size of a tensor map are aligned as one.
    FunctionHandle add(std::span<const std::size_t> bytes, HostKernel run);
    // A kernel with known PTX, with parameters of these sizes.
    FunctionHandle add(Known known, std::span<const std::size_t> bytes, ContextHandle context);
    // A kernel of a cubin, which says of its parameters itself; what it does is not run, but what
    // a test gives by `stand_in`.
    FunctionHandle add_code(ContextHandle context, std::vector<Kernel::Parameter> parameters);
    std::shared_ptr<const Kernel> find(FunctionHandle handle);
    // Sets the bytes of each parameter, where the code does not tell them.
    void describe(FunctionHandle handle, std::span<const std::size_t> bytes);
    void stand_in(FunctionHandle handle, HostKernel run);
    void allow_shared(FunctionHandle handle, unsigned bytes);

  private:
    static std::vector<Kernel::Parameter> layout(std::span<const std::size_t> bytes);
    FunctionHandle add(std::span<const std::size_t> bytes, Kernel kernel);
    FunctionHandle add(Kernel kernel);
    std::shared_ptr<Kernel> own(FunctionHandle handle);  // with the mutex

    std::mutex mutex_;
    std::map<FunctionHandle, std::shared_ptr<Kernel>> kernels_;
};

}  // namespace ficco::driver_double
