// NVIDIA: the driver library, opened at run time, and a Gpu made of it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ficco/cuda_api.hpp"
#include "ficco/gpu.hpp"

namespace ficco::cuda {

// The driver's functions, each null where the driver has none.
struct Table {
#define FICCO_MEMBER(name, version, since, arguments) Status(*name) arguments = nullptr;
    FICCO_CUDA_FUNCTIONS(FICCO_MEMBER)
    FICCO_CUDA_LAUNCH_FUNCTIONS(FICCO_MEMBER)
#undef FICCO_MEMBER
    int driver_version = 0;  // 13000: CUDA 13.0
};

// Opens libcuda.so.1 the first time and initializes it. Throws GpuError that says what is missing
// and which version brings it; a later call tries again.
const Table& driver();

// Throws GpuError where a call of the driver has not succeeded. FICCO_CALL(cuX, ...) calls a
// function of `table_` so.
void check(Status status, const char* call);
#define FICCO_CALL(function, ...) ::ficco::cuda::check(table_.function(__VA_ARGS__), #function)

// What a device can do, found out once.
struct Capabilities {
    std::string name;
    int major;
    int minor;
    std::array<int, 3> pci;  // domain, bus, device: where it is, whatever number a process gives it
    int copy_engines;
    bool flush_remote_writes;  // a wait can order writes of other devices by itself
    bool batch_copy_12_8;      // cuMemcpyBatchAsync with its first signature
    bool batch_copy_13_0;      // and with the one that replaced it
    std::vector<bool> peers;   // per device: whether this one can reach its memory
};

int device_count();
Capabilities capabilities(int device);

// The device's primary context, which PyTorch and CuPy use, too.
std::shared_ptr<Gpu> open_gpu(int device);

}  // namespace ficco::cuda
