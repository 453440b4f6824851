// NVIDIA: the driver library, opened at run time, and the Gpu implementation for it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ficco/cuda_api.hpp"
#include "ficco/gpu.hpp"

namespace ficco::cuda {

// The driver's functions; null if the driver lacks one.
struct Table {
#define FICCO_MEMBER(name, version, since, arguments) Status(*name) arguments = nullptr;
    FICCO_CUDA_FUNCTIONS(FICCO_MEMBER)
    FICCO_CUDA_LAUNCH_FUNCTIONS(FICCO_MEMBER)
#undef FICCO_MEMBER
    int driver_version = 0;  // 13000: CUDA 13.0
};

// Opens and initializes libcuda.so.1 at the first call. Throws a GpuError that names what is
// missing and the version that has it; a later call tries again.
const Table& driver();

// Throws GpuError if a driver call has failed. FICCO_CALL(cuX, ...) calls a function of `table_`
// and checks its status.
void check(Status status, const char* call);
#define FICCO_CALL(function, ...) ::ficco::cuda::check(table_.function(__VA_ARGS__), #function)

// The capabilities of a device.
struct Capabilities {
    std::string name;
    int major;
    int minor;
    std::array<int, 3> pci;  // domain, bus, device; independent of a process's device numbers
    int copy_engines;
    bool flush_remote_writes;  // a wait can order writes of other devices
    bool batch_copy_12_8;      // cuMemcpyBatchAsync with its first signature
    bool batch_copy_13_0;      // the same with its second signature
    std::vector<bool> peers;   // per device: whether this one can access its memory
};

int device_count();
Capabilities capabilities(int device);

// The device's primary context, which PyTorch and CuPy use, too.
std::shared_ptr<Gpu> open_gpu(int device);

}  // namespace ficco::cuda
