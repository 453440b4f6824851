// The part of AMD's HIP that ficco uses: types, constants, and a table of functions. No vendor
// header is needed; tests/native/cpp/hip/test_hip_api.cpp checks every line against those of HIP 7
// if they are installed.
#pragma once

#include <cstddef>
#include <cstdint>

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

// The functions: result, name, arguments. They have the names by which the library exports them.
#define FICCO_HIP_FUNCTIONS(X)                                                               \
    X(const char*, hipGetErrorName, (Status))                                                \
    X(const char*, hipGetErrorString, (Status))                                              \
    X(Status, hipGetLastError, ())                                                           \
    X(Status, hipDriverGetVersion, (int*))                                                   \
    X(Status, hipGetDeviceCount, (int*))                                                     \
    X(Status, hipGetDevice, (int*))                                                          \
    X(Status, hipSetDevice, (int))                                                           \
    X(Status, hipGetDevicePropertiesR0600, (Properties*, int))                               \
    X(Status, hipDeviceGetAttribute, (int*, int, int))                                       \
    X(Status, hipDeviceCanAccessPeer, (int*, int, int))                                      \
    X(Status, hipDeviceEnablePeerAccess, (int, unsigned))                                    \
    X(Status, hipDeviceSynchronize, ())                                                      \
    X(Status, hipDeviceGetStreamPriorityRange, (int*, int*))                                 \
    X(Status, hipExtMallocWithFlags, (void**, std::size_t, unsigned))                        \
    X(Status, hipFree, (void*))                                                              \
    X(Status, hipHostMalloc, (void**, std::size_t, unsigned))                                \
    X(Status, hipHostGetDevicePointer, (void**, void*, unsigned))                            \
    X(Status, hipHostFree, (void*))                                                          \
    X(Status, hipIpcGetMemHandle, (IpcHandle*, void*))                                       \
    X(Status, hipIpcOpenMemHandle, (void**, IpcHandle, unsigned))                            \
    X(Status, hipIpcCloseMemHandle, (void*))                                                 \
    X(Status, hipMemsetAsync, (void*, int, std::size_t, Stream))                             \
    X(Status, hipMemcpyAsync, (void*, const void*, std::size_t, int, Stream))                \
    X(Status, hipStreamCreateWithPriority, (Stream*, unsigned, int))                         \
    X(Status, hipStreamDestroy, (Stream))                                                    \
    X(Status, hipStreamQuery, (Stream))                                                      \
    X(Status, hipStreamWaitEvent, (Stream, Event, unsigned))                                 \
    X(Status, hipEventCreateWithFlags, (Event*, unsigned))                                   \
    X(Status, hipEventDestroy, (Event))                                                      \
    X(Status, hipEventRecord, (Event, Stream))                                               \
    X(Status, hipEventSynchronize, (Event))                                                  \
    X(Status, hipEventElapsedTime, (float*, Event, Event))                                   \
    X(Status, hipThreadExchangeStreamCaptureMode, (int*))                                    \
    X(Status, hipStreamBeginCapture, (Stream, int))                                          \
    X(Status, hipStreamEndCapture, (Stream, Graph*))                                         \
    X(Status, hipStreamIsCapturing, (Stream, int*))                                          \
    X(Status, hipStreamGetCaptureInfo_v2,                                                    \
      (Stream, int*, unsigned long long*, Graph*, const Node**, std::size_t*))               \
    X(Status, hipGraphGetNodes, (Graph, Node*, std::size_t*))                                \
    X(Status, hipGraphNodeGetType, (Node, int*))                                             \
    X(Status, hipGraphInstantiateWithFlags, (GraphExec*, Graph, unsigned long long))         \
    X(Status, hipGraphLaunch, (GraphExec, Stream))                                           \
    X(Status, hipGraphExecDestroy, (GraphExec))                                              \
    X(Status, hipGraphDestroy, (Graph))                                                      \
    X(Status, hipModuleLoadData, (Module*, const void*))                                     \
    X(Status, hipModuleGetFunction, (Kernel*, Module, const char*))                          \
    X(Status, hipModuleLaunchKernel,                                                         \
      (Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, \
       void**, void**))

struct Table {
#define FICCO_MEMBER(result, name, arguments) result(*name) arguments;
    FICCO_HIP_FUNCTIONS(FICCO_MEMBER)
#undef FICCO_MEMBER
};

// The name of the function at a place of the table.
template <auto place>
constexpr const char* name_of() = delete;
#define FICCO_NAME(result, name, arguments)         \
    template <>                                     \
    constexpr const char* name_of<&Table::name>() { \
        return #name;                               \
    }
FICCO_HIP_FUNCTIONS(FICCO_NAME)
#undef FICCO_NAME

}  // namespace ficco::hip
