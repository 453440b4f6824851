// Memory for windows: allocated, cleared, filled, and accessible by other devices.
#include "ficco/cuda_memory.hpp"

#include "ficco/cuda.hpp"

namespace ficco::cuda {

Pointer new_window_memory(std::size_t bytes) {
    const Table& table_ = driver();
    Pointer memory = 0;
    FICCO_CALL(cuMemAlloc, &memory, bytes);
    try {
        FICCO_CALL(cuMemsetD8Async, memory, 0, bytes, nullptr);
        FICCO_CALL(cuCtxSynchronize);
    } catch (const GpuError&) {
        table_.cuMemFree(memory);
        throw;
    }
    return memory;
}

void delete_window_memory(Pointer address) {
    const Table& table_ = driver();
    FICCO_CALL(cuMemFree, address);
}

void fill_words(Pointer address, std::uint32_t value, std::size_t count) {
    const Table& table_ = driver();
    FICCO_CALL(cuMemsetD32, address, value, count);
    FICCO_CALL(cuCtxSynchronize);  // fills are asynchronous
}

void reach(int peer) {
    constexpr Status kReachedAlready = 704;
    const Table& table_ = driver();
    Device device = 0;
    Context context = nullptr;
    FICCO_CALL(cuDeviceGet, &device, peer);
    FICCO_CALL(cuDevicePrimaryCtxRetain, &context, device);
    const Status status = table_.cuCtxEnablePeerAccess(context, 0);
    table_.cuDevicePrimaryCtxRelease(device);  // the peer's own Gpu keeps it
    if (status != kReachedAlready) check(status, "cuCtxEnablePeerAccess");
}

void synchronize() {
    const Table& table_ = driver();
    FICCO_CALL(cuCtxSynchronize);
}

}  // namespace ficco::cuda
