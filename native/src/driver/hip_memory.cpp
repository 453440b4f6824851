// Memory for windows: allocated, cleared, exported, and opened.
#include "ficco/hip_memory.hpp"

#include <algorithm>
#include <vector>

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

void fill_words(int device, GpuAddress address, std::uint32_t value, std::size_t count) {
    constexpr std::size_t kAtOnce = std::size_t{1} << 18;
    const CurrentDevice current(device);
    const Uncaptured uncaptured;
    const std::vector<std::uint32_t> words(std::min(count, kAtOnce), value);
    const OwnStream own;
    for (std::size_t begin = 0; begin < count; begin += kAtOnce) {
        const std::size_t bytes = sizeof(value) * std::min(kAtOnce, count - begin);
        call<&Table::hipMemcpyAsync>(pointer(address + sizeof(value) * begin),
                                     static_cast<const void*>(words.data()), bytes, kCopyToDevice,
                                     own.stream);
        await(own.stream);
    }
}

void reach(int device, int peer) {
    const CurrentDevice current(device);
    const Status status = library().table.hipDeviceEnablePeerAccess(peer, 0);
    if (status == kReachedAlready) return forget(status);
    check(status, name_of<&Table::hipDeviceEnablePeerAccess>());
}

void synchronize(int device) {
    const CurrentDevice current(device);
    call<&Table::hipDeviceSynchronize>();
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
