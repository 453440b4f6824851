// The kernels of the native core itself: one stores words, one waits for words. See `Gpu::store`
// and `Gpu::await`.
#pragma once

#include <span>

#include "ficco/cuda_api.hpp"
#include "ficco/gpu.hpp"

namespace ficco::cuda {

struct WordKernels {
    Function store = nullptr;
    Function await = nullptr;
};

// Loads the kernels for a device, whose primary context is current, and keeps the context until the
// process ends, because the last use by a stream is unknown. The first call per device may wait for
// the device; later calls, while streams may wait, only return its result. Throws GpuError.
WordKernels load_word_kernels(Device device);

// Launches a kernel with at most kMostStored words.
void launch_store_kernel(Function kernel, std::span<const WordCommand> writes, Stream stream);
void launch_await_kernel(Function kernel, const KernelWait& wait, Stream stream);

}  // namespace ficco::cuda
