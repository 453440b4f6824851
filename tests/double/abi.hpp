// The part of NVIDIA's driver interface that the double implements: handles, statuses, structures.
// It does not share ficco's declarations, so that tests detect an error in either.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ficco::driver_double {

using Status = int;
using Address = unsigned long long;
// Handles are numbers cast to pointers and are never reused.
using Handle = void*;
using ContextHandle = Handle;
using StreamHandle = Handle;
using EventHandle = Handle;
using GraphHandle = Handle;
using NodeHandle = Handle;
using ExecHandle = Handle;
using HostFunction = void (*)(void*);
using ModuleHandle = Handle;
using FunctionHandle = Handle;
// A test's replacement of a kernel. It gets the addresses of the parameters, and grid (3 numbers),
// threads of a block and bytes of shared memory of the launch.
using HostKernel = void (*)(void** parameters, const unsigned* shape);

inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kNotInitialized = 3;
inline constexpr Status kInvalidDevice = 101;
inline constexpr Status kInvalidContext = 201;
inline constexpr Status kPeerAccessUnsupported = 217;
inline constexpr Status kInvalidPtx = 218;
inline constexpr Status kOperatingSystem = 304;
inline constexpr Status kInvalidHandle = 400;
inline constexpr Status kIllegalState = 401;
inline constexpr Status kNotFound = 500;
inline constexpr Status kNotReady = 600;
inline constexpr Status kIllegalAddress = 700;
inline constexpr Status kPeerAccessEnabledAlready = 704;
inline constexpr Status kPeerAccessNotEnabled = 705;
inline constexpr Status kContextIsDestroyed = 709;
inline constexpr Status kHostMemoryRegisteredAlready = 712;
inline constexpr Status kHostMemoryNotRegistered = 713;
inline constexpr Status kNotSupported = 801;
inline constexpr Status kCaptureUnsupported = 900;
inline constexpr Status kCaptureInvalidated = 901;
inline constexpr Status kCaptureMerge = 902;
inline constexpr Status kCaptureUnmatched = 903;
inline constexpr Status kCaptureUnjoined = 904;
inline constexpr Status kCaptureIsolation = 905;
inline constexpr Status kCaptureImplicit = 906;
inline constexpr Status kCapturedEvent = 907;
inline constexpr Status kCaptureWrongThread = 908;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kEventExternal = 1;

enum class NodeType : int {
    kKernel = 0,
    kMemcpy = 1,
    kMemset = 2,
    kHost = 3,
    kGraph = 4,
    kEmpty = 5,
    kWaitEvent = 6,
    kEventRecord = 7,
    kBatchMemOp = 12,
};

struct EdgeData {  // CUgraphEdgeData; an ordinary edge is all zeros
    unsigned char from_port, to_port, type, reserved[5];
};
static_assert(sizeof(EdgeData) == 8);

enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };

inline constexpr int kMemoryHost = 1;
inline constexpr int kMemoryDevice = 2;
inline constexpr int kMemoryUnified = 4;

struct LaunchAttribute {  // CUlaunchAttribute
    int id;
    int padding;
    union {
        int number;
        std::uint64_t pad[8];
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    StreamHandle stream;
    LaunchAttribute* attributes;
    unsigned count;
};

inline constexpr int kLaunchChained = 6;  // programmatic stream serialization

struct Copy2D {  // CUDA_MEMCPY2D
    struct Source {
        std::size_t x_bytes, y;
        int kind;
        const void* host;
        Address device;
        void* array;
        std::size_t pitch;
    } source;
    struct Target {
        std::size_t x_bytes, y;
        int kind;
        void* host;
        Address device;
        void* array;
        std::size_t pitch;
    } target;
    std::size_t width_bytes, height;
};
static_assert(sizeof(Copy2D) == 128);

inline constexpr int kOpWaitValue32 = 1;
inline constexpr int kOpWriteValue32 = 2;
inline constexpr int kOpBarrier = 6;
inline constexpr unsigned kWaitFlush = 1U << 30;
enum class Comparison : unsigned { kGreaterOrEqual = 0, kEqual = 1, kAnd = 2, kNor = 3 };

union MemOp {  // CUstreamBatchMemOpParams
    int operation;
    struct {
        int operation;
        Address address;
        std::uint64_t value;  // 32 bits are used
        unsigned flags;
        Address alias;
    } word;
    struct {
        int operation;
        unsigned flags;
    } barrier;
    std::uint64_t pad[6];
};
static_assert(sizeof(MemOp) == 48 && offsetof(MemOp, word.value) == 16);

// The parameter of the only kernel that is passed as PTX: addresses and values of words. The first
// words are stored before the others.
struct StoredWords {
    Address at[128];
    std::uint32_t value[128];
    std::uint32_t first, count;
};
static_assert(sizeof(StoredWords) == 1544);

// The parameter of the kernel that waits for words: their addresses and values; the words to give
// up for, to set meanwhile and to report to; the data to fill; and the number of each word.
struct AwaitedWords {
    Address at[128];
    std::uint32_t value[128];
    Address stop, lane, missed;
    std::uint64_t limit_ns;
    Address data[2];
    std::uint64_t data_bytes;
    std::uint32_t number[128];
    std::uint32_t mark, count;
};
static_assert(sizeof(AwaitedWords) == 2112);

// A tensor map in this driver's encoding; the real encoding is unknown.
struct alignas(64) TensorMap {
    std::uint64_t address;
    std::uint64_t cols, rows, pitch;
    std::uint64_t box_cols, box_rows;
    std::uint64_t type, swizzle, fill;
    std::uint64_t unused[7];
};
static_assert(sizeof(TensorMap) == 128);

// Thrown by a call that ends with a status other than success.
struct Failure {
    Status status;
};

}  // namespace ficco::driver_double
