// Memory for windows: allocated, cleared, exported, and opened.
#include "ficco/hip_memory.hpp"

#include "ficco/hip.hpp"
#include "ficco/hip_device.hpp"

namespace ficco::hip {

namespace {

// Clears memory of the current device.
void clear(void* memory, std::size_t bytes) {
    struct OwnStream {
        OwnStream() { call<&Table::hipStreamCreateWithPriority>(&stream, kStreamNonBlocking, 0); }
        ~OwnStream() { library().table.hipStreamDestroy(stream); }
        Stream stream = nullptr;
    };
    const OwnStream own;
    call<&Table::hipMemsetAsync>(memory, 0, bytes, own.stream);
    await(own.stream);
}

}  // namespace

GpuAddress new_window_memory(int device, std::size_t bytes, WindowPart part) {
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    const unsigned flags = part == WindowPart::data ? kMemoryFineGrained : kMemoryUncached;
    void* memory = nullptr;
    call<&Table::hipExtMallocWithFlags>(&memory, bytes, flags);
    try {
        clear(memory, bytes);
    } catch (const GpuError&) {
        library().table.hipFree(memory);
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
