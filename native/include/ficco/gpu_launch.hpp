// A kernel that a program launches by itself: where each of its parameters comes from in a call,
// read from the numbers that Python hands over. They are described at GpuProgram.set_launches in
// ficco/_native.pyi. What stands around a launch is in gpu_program.hpp.
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
    std::size_t bytes;     // 0: not passed, only held to what it must be
    std::int64_t divisor;  // an address, or a pitch in elements, is a multiple of it
    std::int64_t value;    // a constant; the index of a word; what a pitch must be, 0: anything
    Place place;           // of an address or a tensor; a pitch has its slot alone
    int element_bytes;     // of a pitch or a tensor
    TensorBox box;         // of a tensor, but for address and pitch
};

// Throws std::invalid_argument that names row and field. `fields` is rows x kParameterFields.
std::vector<LaunchParameter> read_parameters(std::span<const std::int64_t> fields,
                                             const OpLimits& limits);

// What Python hands over of a launch.
struct LaunchBinding {
    KernelLaunch kernel;
    std::span<const std::int64_t> parameters;
};

// Where the slots and words of a call lie.
struct LaunchPlaces {
    std::span<const std::array<GpuAddress, kWindowCopies>>
        bases;                                    // by slot: copy of the call, other
    std::span<const std::int64_t> pitches;        // by slot
    std::array<GpuAddress, kWindowCopies> words;  // own: copy of the call, other
    int copy;                                     // of the window, that the call uses
};

class GpuLaunch {
  public:
    // Loads the kernel and holds its parameters against what the driver says of it. Throws
    // std::invalid_argument where they differ.
    GpuLaunch(Gpu& gpu, const LaunchBinding& binding, const OpLimits& limits);

    std::span<const LaunchParameter> parameters() const noexcept { return parameters_; }

    // Whether the kernel is one for these addresses and pitches: compilers rely on what divides
    // them. Parameters in other slots than `slots` says are not looked at.
    bool fits(const LaunchPlaces& places, const std::vector<bool>& slots) const;

    // Enqueues it. The places fit.
    void run(Gpu& gpu, const LaunchPlaces& places, GpuTensorMaps& maps, GpuStream stream);

  private:
    struct alignas(128) Block {
        std::array<std::byte, 128> bytes;
    };

    KernelLaunch kernel_;
    std::vector<LaunchParameter> parameters_;
    std::vector<Block> memory_;        // parameters as the kernel takes them
    std::vector<std::byte*> targets_;  // by entry of parameters_; null where none is passed
    std::vector<void*> passed_;        // those that are
};

}  // namespace ficco
