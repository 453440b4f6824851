// A kernel that a program launches: the source of each parameter in a call, read from the numbers
// that Python passes. GpuProgram.set_launches in ficco/_native.pyi describes them. The code around
// a launch is in gpu_program.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/gpu_tensor_maps.hpp"
#include "ficco/gpu_window.hpp"
#include "ficco/limits.hpp"
#include "ficco/op.hpp"

namespace ficco {

inline constexpr int kParameterFields = 16;

struct LaunchParameter {
    enum class Kind { constant, address, word, pitch, tensor, copy };
    Kind kind;
    std::size_t bytes;     // 0: not passed, only compared with `value`
    std::int64_t divisor;  // an address, or a pitch in elements, is a multiple of it
    std::int64_t value;    // a constant; the index of a word; the required pitch, 0: any
    Place place;           // of an address or a tensor; a pitch uses only its slot
    int element_bytes;     // of a pitch or a tensor
    TensorBox box;         // of a tensor, without address and pitch
};

// Throws std::invalid_argument that names row and field. `fields` is rows x kParameterFields.
std::vector<LaunchParameter> read_parameters(std::span<const std::int64_t> fields,
                                             const OpLimits& limits);

// A launch as Python passes it.
struct LaunchBinding {
    KernelLaunch kernel;
    std::span<const std::int64_t> parameters;
};

// Addresses of the slots and words of a call.
struct LaunchPlaces {
    std::span<const std::array<GpuAddress, kWindowCopies>>
        bases;                                    // by slot: copy of the call, other
    std::span<const std::int64_t> pitches;        // by slot
    std::array<GpuAddress, kWindowCopies> words;  // own: copy of the call, other
    int copy;                                     // of the window, that the call uses
};

class GpuLaunch {
  public:
    // Loads the kernel and compares its parameters with those that the driver reports. Throws
    // std::invalid_argument if they differ.
    GpuLaunch(Gpu& gpu, const LaunchBinding& binding, const OpLimits& limits);

    std::span<const LaunchParameter> parameters() const noexcept { return parameters_; }

    // Whether the kernel was compiled for these addresses and pitches, as compilers assume
    // divisors. Only parameters in the slots that `slots` selects are checked.
    bool fits(const LaunchPlaces& places, const std::vector<bool>& slots) const;

    // Enqueues the launch. The places must fit.
    void run(Gpu& gpu, const LaunchPlaces& places, GpuTensorMaps& maps, GpuStream stream);

  private:
    struct alignas(128) Block {
        std::array<std::byte, 128> bytes;
    };

    KernelLaunch kernel_;
    std::vector<LaunchParameter> parameters_;
    std::vector<Block> memory_;        // the kernel's parameters
    std::vector<std::byte*> targets_;  // by entry of parameters_; null if it is not passed
    std::vector<void*> passed_;        // addresses of the passed parameters
};

}  // namespace ficco
