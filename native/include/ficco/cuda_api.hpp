// The part of NVIDIA's driver API that ficco uses: types, constants, and a list of functions. No
// vendor header is needed; tests/native/cpp/test_cuda_api.cpp checks every line against cuda.h if
// that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ficco::cuda {

using Status = int;
using Device = int;
using Pointer = unsigned long long;
struct ContextTag;
struct StreamTag;
struct EventTag;
struct GraphTag;
struct GraphExecTag;
struct NodeTag;
struct ModuleTag;
struct FunctionTag;
using Context = ContextTag*;
using Stream = StreamTag*;
using Event = EventTag*;
using Graph = GraphTag*;
using GraphExec = GraphExecTag*;
using Node = NodeTag*;
using Module = ModuleTag*;
using Function = FunctionTag*;

inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kNotReady = 600;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocMapped = 2;
inline constexpr int kMemoryDevice = 2;
inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureActive = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kNodeKernel = 0;
inline constexpr int kNodeMemcpy = 1;

inline constexpr int kLaunchChained = 6;  // programmatic stream serialization

inline constexpr int kMostSharedBytes = 8;  // attribute of a function: dynamic shared memory

inline constexpr int kInterleaveNone = 0;
inline constexpr int kPromoteTo128Bytes = 2;  // in L2

inline constexpr int kOpWaitValue32 = 1;
inline constexpr int kOpWriteValue32 = 2;
inline constexpr unsigned kWaitEqual = 1;

enum class Attribute : int {
    kProcessors = 16,
    kPciBus = 33,
    kPciDevice = 34,
    kThreadsOfProcessor = 39,
    kAsyncEngineCount = 40,
    kPciDomain = 50,
    kMajor = 75,
    kMinor = 76,
    kCanFlushRemoteWrites = 98,
};

// An entry of a batch of memory operations (CUstreamBatchMemOpParams): a union of 6 x 8 bytes.
// Waits and writes use its first member.
union MemOp {
    struct {
        int operation;
        int padding;
        Pointer address;
        std::uint64_t value;  // 32 bits are used
        unsigned flags;
        int padding_2;
        Pointer alias;
    } word;
    std::uint64_t pad[6];
};

// An attribute of a launch (CUlaunchAttribute); its value is a union.
struct LaunchAttribute {
    int id;
    int padding;
    union {
        int number;
        std::uint64_t pad[8];
    } value;
};

struct LaunchConfig {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned count;
};

struct Copy2D {
    std::size_t source_x_bytes, source_y;
    int source_kind;
    const void* source_host;
    Pointer source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x_bytes, target_y;
    int target_kind;
    void* target_host;
    Pointer target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width_bytes, height;
};

// Descriptor of a tensor for bulk loads (CUtensorMap).
struct alignas(128) TensorMap {
    std::uint64_t opaque[16];
};

// Name, the CUDA version of the interface (for cuGetProcAddress), the version that introduced that
// interface, arguments; all return a status.
#define FICCO_CUDA_FUNCTIONS(X)                                                                \
    X(cuInit, 12000, 2000, (unsigned))                                                         \
    X(cuDriverGetVersion, 12000, 2020, (int*))                                                 \
    X(cuGetErrorName, 12000, 6000, (Status, const char**))                                     \
    X(cuGetErrorString, 12000, 6000, (Status, const char**))                                   \
    X(cuDeviceGet, 12000, 2000, (Device*, int))                                                \
    X(cuDeviceGetCount, 12000, 2000, (int*))                                                   \
    X(cuDeviceGetName, 12000, 2000, (char*, int, Device))                                      \
    X(cuDeviceGetAttribute, 12000, 2000, (int*, Attribute, Device))                            \
    X(cuDeviceCanAccessPeer, 12000, 4000, (int*, Device, Device))                              \
    X(cuDevicePrimaryCtxRetain, 12000, 7000, (Context*, Device))                               \
    X(cuDevicePrimaryCtxRelease, 12000, 11000, (Device))                                       \
    X(cuCtxCreate, 3020, 3020, (Context*, unsigned, Device))                                   \
    X(cuCtxDestroy, 12000, 4000, (Context))                                                    \
    X(cuCtxPushCurrent, 12000, 4000, (Context))                                                \
    X(cuCtxPopCurrent, 12000, 4000, (Context*))                                                \
    X(cuCtxGetStreamPriorityRange, 12000, 5050, (int*, int*))                                  \
    X(cuCtxEnablePeerAccess, 12000, 4000, (Context, unsigned))                                 \
    X(cuCtxSynchronize, 12000, 2000, ())                                                       \
    X(cuMemAlloc, 12000, 3020, (Pointer*, std::size_t))                                        \
    X(cuMemFree, 12000, 3020, (Pointer))                                                       \
    X(cuMemsetD32, 12000, 3020, (Pointer, unsigned, std::size_t))                              \
    X(cuMemHostAlloc, 12000, 2020, (void**, std::size_t, unsigned))                            \
    X(cuMemHostGetDevicePointer, 12000, 3020, (Pointer*, void*, unsigned))                     \
    X(cuMemFreeHost, 12000, 2000, (void*))                                                     \
    X(cuMemsetD8Async, 12000, 3020, (Pointer, unsigned char, std::size_t, Stream))             \
    X(cuMemcpyAsync, 12000, 4000, (Pointer, Pointer, std::size_t, Stream))                     \
    X(cuMemcpyDtoHAsync, 12000, 3020, (void*, Pointer, std::size_t, Stream))                   \
    X(cuMemcpy2DAsync, 12000, 3020, (const Copy2D*, Stream))                                   \
    X(cuStreamCreateWithPriority, 12000, 5050, (Stream*, unsigned, int))                       \
    X(cuStreamDestroy, 12000, 4000, (Stream))                                                  \
    X(cuStreamQuery, 12000, 2000, (Stream))                                                    \
    X(cuStreamWaitEvent, 12000, 3020, (Stream, Event, unsigned))                               \
    X(cuThreadExchangeStreamCaptureMode, 12000, 10010, (int*))                                 \
    X(cuStreamBeginCapture, 12000, 10010, (Stream, int))                                       \
    X(cuStreamEndCapture, 12000, 10000, (Stream, Graph*))                                      \
    X(cuStreamIsCapturing, 12000, 10000, (Stream, int*))                                       \
    X(cuStreamGetCaptureInfo, 12000, 11030,                                                    \
      (Stream, int*, std::uint64_t*, Graph*, const Node**, std::size_t*))                      \
    X(cuGraphGetNodes, 12000, 10000, (Graph, Node*, std::size_t*))                             \
    X(cuGraphNodeGetType, 12000, 10000, (Node, int*))                                          \
    X(cuGraphInstantiateWithFlags, 12000, 11040, (GraphExec*, Graph, unsigned long long))      \
    X(cuGraphLaunch, 12000, 10000, (GraphExec, Stream))                                        \
    X(cuGraphExecDestroy, 12000, 10000, (GraphExec))                                           \
    X(cuGraphDestroy, 12000, 10000, (Graph))                                                   \
    X(cuEventCreate, 12000, 2000, (Event*, unsigned))                                          \
    X(cuEventDestroy, 12000, 4000, (Event))                                                    \
    X(cuEventRecord, 12000, 2000, (Event, Stream))                                             \
    X(cuEventSynchronize, 12000, 2000, (Event))                                                \
    X(cuEventElapsedTime, 12000, 2000, (float*, Event, Event))                                 \
    X(cuStreamWriteValue32, 12000, 11070, (Stream, Pointer, std::uint32_t, unsigned))          \
    X(cuStreamWaitValue32, 12000, 11070, (Stream, Pointer, std::uint32_t, unsigned))           \
    X(cuStreamBatchMemOp, 12000, 11070, (Stream, unsigned, MemOp*, unsigned))                  \
    X(cuModuleLoadData, 12000, 2000, (Module*, const void*))                                   \
    X(cuModuleGetFunction, 12000, 2000, (Function*, Module, const char*))                      \
    X(cuFuncSetAttribute, 12000, 9000, (Function, int, int))                                   \
    X(cuLaunchKernel, 12000, 4000,                                                             \
      (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, \
       void**, void**))                                                                        \
    X(cuLaunchKernelEx, 12000, 11060, (const LaunchConfig*, Function, void**, void**))         \
    X(cuTensorMapEncodeTiled, 12000, 12000,                                                    \
      (TensorMap*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,      \
       const std::uint32_t*, const std::uint32_t*, int, int, int, int))

// Likewise for functions that only kernel launches need.
#define FICCO_CUDA_LAUNCH_FUNCTIONS(X)      \
    X(cuFuncLoad, 12040, 12040, (Function)) \
    X(cuFuncGetParamInfo, 12040, 12040, (Function, std::size_t, std::size_t*, std::size_t*))

}  // namespace ficco::cuda
