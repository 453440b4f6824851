// The kernel by which a device of AMD waits for words (ficco/kernels/await_words_amd_kernel.py).
#pragma once

#include <cstdint>
#include <string_view>

#include "ficco/gpu.hpp"
#include "ficco/hip_api.hpp"

namespace ficco::hip {

// The rate of the constant clock, which kernels read. Throws GpuError.
std::uint64_t clock_ticks_a_second(int device);

class AwaitKernel {
  public:
    // Words of a launch; a wait for more of them has several launches.
    static constexpr std::size_t kWords = 32;

    // Loads the code object to the current device, which may wait for the device. `shared_bytes`:
    // dynamic shared memory of a launch. Throws GpuError.
    AwaitKernel(int device, std::string_view code, unsigned shared_bytes);
    void launch(const KernelWait& wait, Stream stream) const;

  private:
    void launch(const KernelWait& wait, std::span<const AwaitedValue> words, Stream stream) const;

    Kernel kernel_;
    unsigned programs_;  // one for each L2 of the device
    unsigned threads_;   // of a program
    unsigned shared_bytes_;
    double ticks_a_ns_;  // of the device's constant clock
};

}  // namespace ficco::hip
