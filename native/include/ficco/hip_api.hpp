// The part of AMD's HIP that ficco uses: types, constants, and a table of functions. No vendor
// header is needed; native/tests/hip/test_hip_api.cpp checks every line against those of HIP 7 if
// they are installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace ficco::hip {

using Status = int;
struct StreamTag;
struct EventTag;
struct GraphTag;
struct GraphExecTag;
struct NodeTag;
struct ModuleTag;
struct FunctionTag;
using Stream = StreamTag*;
using Event = EventTag*;
using Graph = GraphTag*;
using GraphExec = GraphExecTag*;
using Node = NodeTag*;
using Module = ModuleTag*;
using Kernel = FunctionTag*;

inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kNoDevice = 100;
inline constexpr Status kNotReady = 600;
inline constexpr Status kReachedAlready = 704;

inline constexpr int kThreadsOfUnit = 57;  // attributes of devices
inline constexpr int kWallClockRate = 10017;
inline constexpr int kNumberOfXccs = 10018;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostMapped = 2;
inline constexpr unsigned kHostCoherent = 0x40000000;
inline constexpr unsigned kMemoryFineGrained = 1;
inline constexpr unsigned kMemoryUncached = 3;
inline constexpr unsigned kIpcEnablePeerAccess = 1;

inline constexpr int kCopyToDevice = 1;
inline constexpr int kCopyToHost = 2;
inline constexpr int kCopyWithoutComputeUnits = 1024;  // by a copy engine (SDMA)

inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureActive = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kNodeKernel = 0;
inline constexpr int kNodeMemcpy = 1;

// The properties of a device (hipDeviceProp_tR0600). The function hipGetDeviceProperties fills an
// older structure; hipGetDevicePropertiesR0600 fills this one.
struct Properties {
    char name[256];
    std::byte identity[32];
    std::size_t memory_bytes;
    std::size_t shared_bytes;  // of a block
    int registers;
    int warp;
    std::byte limits[48];
    int major, minor;
    std::byte textures[20];
    int compute_units;
    std::byte surfaces[192];
    int pci_bus, pci_device, pci_domain;
    int tcc;
    int copy_engines;
    std::byte others[556];
    char arch[256];  // such as "gfx942:sramecc+:xnack-"
    std::byte rest[56];
};

struct IpcHandle {
    char reserved[64];
};

// The functions; they have the names by which the library exports them.
struct Table {
    const char* (*hipGetErrorName)(Status);
    const char* (*hipGetErrorString)(Status);
    Status (*hipGetLastError)();
    Status (*hipDriverGetVersion)(int*);
    Status (*hipGetDeviceCount)(int*);
    Status (*hipGetDevice)(int*);
    Status (*hipSetDevice)(int);
    Status (*hipGetDevicePropertiesR0600)(Properties*, int);
    Status (*hipDeviceGetAttribute)(int*, int, int);
    Status (*hipDeviceCanAccessPeer)(int*, int, int);
    Status (*hipDeviceEnablePeerAccess)(int, unsigned);
    Status (*hipDeviceSynchronize)();
    Status (*hipDeviceGetStreamPriorityRange)(int*, int*);
    Status (*hipExtMallocWithFlags)(void**, std::size_t, unsigned);
    Status (*hipFree)(void*);
    Status (*hipHostMalloc)(void**, std::size_t, unsigned);
    Status (*hipHostGetDevicePointer)(void**, void*, unsigned);
    Status (*hipHostFree)(void*);
    Status (*hipIpcGetMemHandle)(IpcHandle*, void*);
    Status (*hipIpcOpenMemHandle)(void**, IpcHandle, unsigned);
    Status (*hipIpcCloseMemHandle)(void*);
    Status (*hipMemsetAsync)(void*, int, std::size_t, Stream);
    Status (*hipMemcpyAsync)(void*, const void*, std::size_t, int, Stream);
    Status (*hipStreamCreateWithPriority)(Stream*, unsigned, int);
    Status (*hipStreamDestroy)(Stream);
    Status (*hipStreamQuery)(Stream);
    Status (*hipStreamWaitEvent)(Stream, Event, unsigned);
    Status (*hipEventCreateWithFlags)(Event*, unsigned);
    Status (*hipEventDestroy)(Event);
    Status (*hipEventRecord)(Event, Stream);
    Status (*hipEventSynchronize)(Event);
    Status (*hipEventElapsedTime)(float*, Event, Event);
    Status (*hipThreadExchangeStreamCaptureMode)(int*);
    Status (*hipStreamBeginCapture)(Stream, int);
    Status (*hipStreamEndCapture)(Stream, Graph*);
    Status (*hipStreamIsCapturing)(Stream, int*);
    Status (*hipStreamGetCaptureInfo_v2)(Stream, int*, unsigned long long*, Graph*, const Node**,
                                         std::size_t*);
    Status (*hipGraphGetNodes)(Graph, Node*, std::size_t*);
    Status (*hipGraphNodeGetType)(Node, int*);
    Status (*hipGraphInstantiateWithFlags)(GraphExec*, Graph, unsigned long long);
    Status (*hipGraphLaunch)(GraphExec, Stream);
    Status (*hipGraphExecDestroy)(GraphExec);
    Status (*hipGraphDestroy)(Graph);
    Status (*hipModuleLoadData)(Module*, const void*);
    Status (*hipModuleGetFunction)(Kernel*, Module, const char*);
    Status (*hipModuleLaunchKernel)(Kernel, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    unsigned, unsigned, Stream, void**, void**);
};

// A function of the library, and its place in the table.
template <class Pointer>
struct Entry {
    const char* name;
    Pointer Table::* place;
};
template <class Pointer>
Entry(const char*, Pointer Table::*) -> Entry<Pointer>;

inline constexpr std::tuple kFunctions{
    Entry{"hipGetErrorName", &Table::hipGetErrorName},
    Entry{"hipGetErrorString", &Table::hipGetErrorString},
    Entry{"hipGetLastError", &Table::hipGetLastError},
    Entry{"hipDriverGetVersion", &Table::hipDriverGetVersion},
    Entry{"hipGetDeviceCount", &Table::hipGetDeviceCount},
    Entry{"hipGetDevice", &Table::hipGetDevice},
    Entry{"hipSetDevice", &Table::hipSetDevice},
    Entry{"hipGetDevicePropertiesR0600", &Table::hipGetDevicePropertiesR0600},
    Entry{"hipDeviceGetAttribute", &Table::hipDeviceGetAttribute},
    Entry{"hipDeviceCanAccessPeer", &Table::hipDeviceCanAccessPeer},
    Entry{"hipDeviceEnablePeerAccess", &Table::hipDeviceEnablePeerAccess},
    Entry{"hipDeviceSynchronize", &Table::hipDeviceSynchronize},
    Entry{"hipDeviceGetStreamPriorityRange", &Table::hipDeviceGetStreamPriorityRange},
    Entry{"hipExtMallocWithFlags", &Table::hipExtMallocWithFlags},
    Entry{"hipFree", &Table::hipFree},
    Entry{"hipHostMalloc", &Table::hipHostMalloc},
    Entry{"hipHostGetDevicePointer", &Table::hipHostGetDevicePointer},
    Entry{"hipHostFree", &Table::hipHostFree},
    Entry{"hipIpcGetMemHandle", &Table::hipIpcGetMemHandle},
    Entry{"hipIpcOpenMemHandle", &Table::hipIpcOpenMemHandle},
    Entry{"hipIpcCloseMemHandle", &Table::hipIpcCloseMemHandle},
    Entry{"hipMemsetAsync", &Table::hipMemsetAsync},
    Entry{"hipMemcpyAsync", &Table::hipMemcpyAsync},
    Entry{"hipStreamCreateWithPriority", &Table::hipStreamCreateWithPriority},
    Entry{"hipStreamDestroy", &Table::hipStreamDestroy},
    Entry{"hipStreamQuery", &Table::hipStreamQuery},
    Entry{"hipStreamWaitEvent", &Table::hipStreamWaitEvent},
    Entry{"hipEventCreateWithFlags", &Table::hipEventCreateWithFlags},
    Entry{"hipEventDestroy", &Table::hipEventDestroy},
    Entry{"hipEventRecord", &Table::hipEventRecord},
    Entry{"hipEventSynchronize", &Table::hipEventSynchronize},
    Entry{"hipEventElapsedTime", &Table::hipEventElapsedTime},
    Entry{"hipThreadExchangeStreamCaptureMode", &Table::hipThreadExchangeStreamCaptureMode},
    Entry{"hipStreamBeginCapture", &Table::hipStreamBeginCapture},
    Entry{"hipStreamEndCapture", &Table::hipStreamEndCapture},
    Entry{"hipStreamIsCapturing", &Table::hipStreamIsCapturing},
    Entry{"hipStreamGetCaptureInfo_v2", &Table::hipStreamGetCaptureInfo_v2},
    Entry{"hipGraphGetNodes", &Table::hipGraphGetNodes},
    Entry{"hipGraphNodeGetType", &Table::hipGraphNodeGetType},
    Entry{"hipGraphInstantiateWithFlags", &Table::hipGraphInstantiateWithFlags},
    Entry{"hipGraphLaunch", &Table::hipGraphLaunch},
    Entry{"hipGraphExecDestroy", &Table::hipGraphExecDestroy},
    Entry{"hipGraphDestroy", &Table::hipGraphDestroy},
    Entry{"hipModuleLoadData", &Table::hipModuleLoadData},
    Entry{"hipModuleGetFunction", &Table::hipModuleGetFunction},
    Entry{"hipModuleLaunchKernel", &Table::hipModuleLaunchKernel},
};

// The name of the function at a place of the table.
template <auto place>
constexpr const char* name_of() {
    return std::apply(
        [](const auto&... entry) {
            const char* name = nullptr;
            const auto look = [&](const auto& one) {
                if constexpr (std::is_same_v<decltype(one.place), decltype(place)>) {
                    if (one.place == place) name = one.name;
                }
            };
            (look(entry), ...);
            return name;
        },
        kFunctions);
}

}  // namespace ficco::hip
