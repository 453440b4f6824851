// Memory for windows: allocated, cleared, exported, and opened.
#include "ficco/hip_memory.hpp"

#include "ficco/hip.hpp"
#include "ficco/hip_device.hpp"

namespace ficco::hip {

namespace {

struct OwnStream {
    OwnStream() { call<&Table::hipStreamCreateWithPriority>(&stream, kStreamNonBlocking, 0); }
    ~OwnStream() { forget(library().table.hipStreamDestroy(stream)); }
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;

    Stream stream = nullptr;
};

}  // namespace

GpuAddress new_window_memory(int device, std::size_t bytes, WindowPart part) {
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    const unsigned flags = part == WindowPart::data ? kMemoryFineGrained : kMemoryUncached;
    const OwnStream own;
    void* memory = nullptr;
    call<&Table::hipExtMallocWithFlags>(&memory, bytes, flags);
    try {
        call<&Table::hipMemsetAsync>(memory, 0, bytes, own.stream);
        await(own.stream);
    } catch (const GpuError&) {
        forget(library().table.hipFree(memory));  // it waits for the stream, which still exists
        throw;
    }
    return reinterpret_cast<GpuAddress>(memory);
}

void delete_window_memory(int device, GpuAddress address) {
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    call<&Table::hipFree>(pointer(address));
}

IpcHandle export_memory(int device, GpuAddress address) {
    const CurrentDevice current(device);
    IpcHandle handle{};
    call<&Table::hipIpcGetMemHandle>(&handle, pointer(address));
    return handle;
}

GpuAddress open_memory(int device, const IpcHandle& handle) {
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    void* memory = nullptr;
    call<&Table::hipIpcOpenMemHandle>(&memory, handle, kIpcEnablePeerAccess);
    return reinterpret_cast<GpuAddress>(memory);
}

void close_memory(int device, GpuAddress address) {
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    call<&Table::hipIpcCloseMemHandle>(pointer(address));
}

}  // namespace ficco::hip
