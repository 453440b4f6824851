// The interface: start, errors, devices and contexts.
#include <array>
#include <cstdio>
#include <cstring>
#include <utility>

#include "calls.hpp"
#include "vendor.hpp"

using namespace ficco::driver_double;

namespace {

struct ErrorName {
    Status status;
    const char* name;
    const char* text;
};

constexpr std::array kErrors{
    ErrorName{kSuccess, "CUDA_SUCCESS", "no error"},
    ErrorName{kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    ErrorName{kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    ErrorName{kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    ErrorName{100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    ErrorName{kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    ErrorName{kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    ErrorName{kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
              "peer access is not supported between these two devices"},
    ErrorName{kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"},
    ErrorName{kInvalidPtx, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    ErrorName{kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    ErrorName{kIllegalState, "CUDA_ERROR_ILLEGAL_STATE",
              "the operation cannot be performed in the present state"},
    ErrorName{kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    ErrorName{kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    ErrorName{kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS",
              "an illegal memory access was encountered"},
    ErrorName{kPeerAccessEnabledAlready, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
              "peer access is already enabled"},
    ErrorName{kPeerAccessNotEnabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
              "peer access has not been enabled"},
    ErrorName{kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    ErrorName{kHostMemoryRegisteredAlready, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
              "part or all of the requested memory range is already mapped"},
    ErrorName{kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
              "pointer does not correspond to a registered memory region"},
    ErrorName{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    ErrorName{kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    ErrorName{kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
              "operation not permitted when stream is capturing"},
    ErrorName{kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
              "operation failed due to a previous error during capture"},
    ErrorName{kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
              "operation would result in a merge of separate capture sequences"},
    ErrorName{kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
              "capture was not ended in the same stream as it began"},
    ErrorName{kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
              "capturing stream has unjoined work"},
    ErrorName{kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
              "dependency created on uncaptured work in another stream"},
    ErrorName{kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
              "operation would make the legacy stream depend on a capturing blocking stream"},
    ErrorName{kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
              "operation not permitted on an event last recorded in a capturing stream"},
    ErrorName{kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
              "attempt to terminate a thread-local capture sequence from another thread"},
    ErrorName{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* find_error(Status status) {
    for (const ErrorName& error : kErrors) {
        if (error.status == status) return &error;
    }
    return nullptr;
}

// CU_DEVICE_ATTRIBUTE_... and its value; attributes that are not here are 0.
constexpr std::array kAttributes{
    std::pair{1, 1024},         // threads per block
    std::pair{2, 1024},         // block dimensions
    std::pair{3, 1024},         //
    std::pair{4, 64},           //
    std::pair{5, 2147483647},   // grid dimensions
    std::pair{6, 65535},        //
    std::pair{7, 65535},        //
    std::pair{8, 49152},        // shared memory per block
    std::pair{10, 32},          // warp size
    std::pair{11, 2147483647},  // greatest pitch
    std::pair{12, 65536},       // registers per block
    std::pair{15, 1},           // copies overlap with kernels
    std::pair{16, 132},         // multiprocessors
    std::pair{19, 1},           // can map host memory
    std::pair{31, 1},           // concurrent kernels
    std::pair{38, 52428800},    // L2 cache
    std::pair{39, 2048},        // threads per multiprocessor
    std::pair{40, 3},           // asynchronous engines
    std::pair{41, 1},           // unified addressing
    std::pair{75, 9},           // compute capability
    std::pair{76, 0},           //
    std::pair{78, 1},           // stream priorities
    std::pair{90, 1},           // compute preemption
    std::pair{91, 1},           // host pointers for registered memory
    std::pair{98, 0},           // can flush remote writes
    std::pair{99, 1},           // host memory can be registered
    std::pair{123, 1},          // memory operations can wait for NOR
};
constexpr int kAttributePciBus = 33;
constexpr int kMostAttribute = 149;

std::string pci_bus_id(int device) {
    std::array<char, 24> text{};
    std::snprintf(text.data(), text.size(), "0000:%02x:00.0", static_cast<unsigned>(device + 1));
    return text.data();
}

void copy_text(char* to, int length, const std::string& text) {
    if (to == nullptr || length < 1) throw Failure{kInvalidValue};
    std::snprintf(to, static_cast<std::size_t>(length), "%s", text.c_str());
}

}  // namespace

DOUBLE_API Status cuInit(unsigned flags) {
    if (const auto fault = Faults::get().take("cuInit")) return *fault;
    if (flags != 0) return kInvalidValue;
    if (Driver::get().device_count() == 0) return 100;
    Driver::get().ready = true;
    return kSuccess;
}

DOUBLE_API Status cuDriverGetVersion(int* version) {
    if (const auto fault = Faults::get().take("cuDriverGetVersion")) return *fault;
    if (version == nullptr) return kInvalidValue;
    *version = Driver::get().version;
    return kSuccess;
}

DOUBLE_API Status cuGetErrorName(Status status, const char** name) {
    const ErrorName* error = find_error(status);
    if (name != nullptr) *name = error != nullptr ? error->name : nullptr;
    return error != nullptr && name != nullptr ? kSuccess : kInvalidValue;
}

DOUBLE_API Status cuGetErrorString(Status status, const char** text) {
    const ErrorName* error = find_error(status);
    if (text != nullptr) *text = error != nullptr ? error->text : nullptr;
    return error != nullptr && text != nullptr ? kSuccess : kInvalidValue;
}

DOUBLE_API Status cuDeviceGet(int* device, int ordinal) {
    return call("cuDeviceGet", [&](Driver& driver, Lock&) {
        driver.device(ordinal);
        out(device) = ordinal;
    });
}

DOUBLE_API Status cuDeviceGetCount(int* count) {
    return call("cuDeviceGetCount",
                [&](Driver& driver, Lock&) { out(count) = driver.device_count(); });
}

DOUBLE_API Status cuDeviceGetName(char* name, int length, int device) {
    return call("cuDeviceGetName", [&](Driver& driver, Lock&) {
        driver.device(device);
        copy_text(name, length, "ficco test double");
    });
}

DOUBLE_API Status cuDeviceGetPCIBusId(char* name, int length, int device) {
    return call("cuDeviceGetPCIBusId", [&](Driver& driver, Lock&) {
        driver.device(device);
        copy_text(name, length, pci_bus_id(device));
    });
}

DOUBLE_API Status cuDeviceGetUuid(unsigned char* uuid, int device) {
    return call("cuDeviceGetUuid", [&](Driver& driver, Lock&) {
        driver.device(device);
        std::memset(&out(uuid), 0xF1, 15);
        uuid[15] = static_cast<unsigned char>(device);
    });
}
DOUBLE_ALIAS(cuDeviceGetUuid_v2, cuDeviceGetUuid);

DOUBLE_API Status cuDeviceTotalMem(std::size_t* bytes, int device) {
    return call("cuDeviceTotalMem", [&](Driver& driver, Lock&) {
        driver.device(device);
        out(bytes) = Memory::total();
    });
}
DOUBLE_ALIAS(cuDeviceTotalMem_v2, cuDeviceTotalMem);

DOUBLE_API Status cuDeviceGetAttribute(int* value, int attribute, int device) {
    return call("cuDeviceGetAttribute", [&](Driver& driver, Lock&) {
        driver.device(device);
        if (attribute < 1 || attribute > kMostAttribute) throw Failure{kInvalidValue};
        out(value) = attribute == kAttributePciBus ? device + 1 : 0;
        for (const auto& [known, known_value] : kAttributes) {
            if (known == attribute) *value = known_value;
        }
    });
}

DOUBLE_API Status cuDeviceCanAccessPeer(int* can, int device, int peer) {
    return call("cuDeviceCanAccessPeer", [&](Driver& driver, Lock&) {
        driver.device(device);
        driver.device(peer);
        out(can) = driver.peers && device != peer ? 1 : 0;
    });
}

DOUBLE_API Status cuDevicePrimaryCtxRetain(ContextHandle* context, int device) {
    return call("cuDevicePrimaryCtxRetain",
                [&](Driver& driver, Lock&) { out(context) = driver.retain(device)->handle; });
}

DOUBLE_API Status cuDevicePrimaryCtxRelease(int device) {
    return call("cuDevicePrimaryCtxRelease",
                [&](Driver& driver, Lock&) { driver.release(device); });
}
DOUBLE_ALIAS(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease);

DOUBLE_API Status cuDevicePrimaryCtxReset(int device) {
    return call("cuDevicePrimaryCtxReset", [&](Driver& driver, Lock&) { driver.reset(device); });
}
DOUBLE_ALIAS(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset);

DOUBLE_API Status cuDevicePrimaryCtxSetFlags(int device, unsigned flags) {
    return call("cuDevicePrimaryCtxSetFlags",
                [&](Driver& driver, Lock&) { driver.device(device).context_flags = flags; });
}
DOUBLE_ALIAS(cuDevicePrimaryCtxSetFlags_v2, cuDevicePrimaryCtxSetFlags);

DOUBLE_API Status cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    return call("cuDevicePrimaryCtxGetState", [&](Driver& driver, Lock&) {
        out(flags) = driver.device(device).context_flags;
        out(active) = driver.device(device).context ? 1 : 0;
    });
}

DOUBLE_API Status cuCtxCreate_v2(ContextHandle* context, unsigned, int device) {
    return call("cuCtxCreate", [&](Driver& driver, Lock& lock) {
        driver.await_destroyed(lock);
        out(context) = driver.create(device)->handle;
        Driver::thread_contexts().push_back(*context);
    });
}

DOUBLE_API Status cuCtxDestroy(ContextHandle context) {
    return call("cuCtxDestroy", [&](Driver& driver, Lock& lock) {
        if (context == nullptr) throw Failure{kInvalidContext};
        driver.destroy(context, lock);
    });
}
DOUBLE_ALIAS(cuCtxDestroy_v2, cuCtxDestroy);

// The number of contexts of all devices that are not primary.
DOUBLE_API int ficcoDoubleContextsApart() {
    Driver& driver = Driver::get();
    const std::lock_guard lock(driver.mutex);
    return static_cast<int>(
        driver.contexts.select([](const Context& context) { return !context.primary; }).size());
}

DOUBLE_API Status cuCtxPushCurrent(ContextHandle context) {
    return call("cuCtxPushCurrent", [&](Driver& driver, Lock&) {
        if (context == nullptr) throw Failure{kInvalidContext};
        driver.contexts.find(context);
        Driver::thread_contexts().push_back(context);
    });
}
DOUBLE_ALIAS(cuCtxPushCurrent_v2, cuCtxPushCurrent);

DOUBLE_API Status cuCtxPopCurrent(ContextHandle* context) {
    return call("cuCtxPopCurrent", [&](Driver&, Lock&) {
        std::vector<ContextHandle>& pushed = Driver::thread_contexts();
        if (pushed.empty()) throw Failure{kInvalidContext};
        if (context != nullptr) *context = pushed.back();
        pushed.pop_back();
    });
}
DOUBLE_ALIAS(cuCtxPopCurrent_v2, cuCtxPopCurrent);

DOUBLE_API Status cuCtxSetCurrent(ContextHandle context) {
    return call("cuCtxSetCurrent", [&](Driver& driver, Lock&) {
        std::vector<ContextHandle>& pushed = Driver::thread_contexts();
        if (context != nullptr) driver.contexts.find(context);
        if (!pushed.empty()) pushed.pop_back();
        if (context != nullptr) pushed.push_back(context);
    });
}

DOUBLE_API Status cuCtxGetCurrent(ContextHandle* context) {
    return call("cuCtxGetCurrent", [&](Driver&, Lock&) {
        const std::vector<ContextHandle>& pushed = Driver::thread_contexts();
        out(context) = pushed.empty() ? nullptr : pushed.back();
    });
}

DOUBLE_API Status cuCtxGetDevice(int* device) {
    return call("cuCtxGetDevice",
                [&](Driver& driver, Lock&) { out(device) = driver.current()->device; });
}

DOUBLE_API Status cuCtxGetDevice_v2(int* device, ContextHandle context) {
    return call("cuCtxGetDevice", [&](Driver& driver, Lock&) {
        const auto chosen = context != nullptr ? driver.contexts.find(context) : driver.current();
        out(device) = chosen->device;
    });
}

DOUBLE_API Status cuCtxSynchronize() {
    return call("cuCtxSynchronize",
                [&](Driver& driver, Lock& lock) { synchronize(driver, lock, driver.current()); });
}

DOUBLE_API Status cuCtxSynchronize_v2(ContextHandle context) {
    return call("cuCtxSynchronize", [&](Driver& driver, Lock& lock) {
        synchronize(driver, lock,
                    context != nullptr ? driver.contexts.find(context) : driver.current());
    });
}

DOUBLE_API Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return call("cuCtxGetStreamPriorityRange", [&](Driver& driver, Lock&) {
        driver.current();
        if (least != nullptr) *least = kVendor.least_priority;
        if (greatest != nullptr) *greatest = kVendor.greatest_priority;
    });
}

DOUBLE_API Status cuCtxEnablePeerAccess(ContextHandle peer, unsigned flags) {
    return call("cuCtxEnablePeerAccess", [&](Driver& driver, Lock&) {
        if (flags != 0) throw Failure{kInvalidValue};
        const auto context = driver.current();
        const int other = driver.contexts.find(peer)->device;
        if (other == context->device || !driver.peers) throw Failure{kPeerAccessUnsupported};
        if (context->may_touch(other)) throw Failure{kPeerAccessEnabledAlready};
        context->allow_peer(other, true);
    });
}

DOUBLE_API Status cuCtxDisablePeerAccess(ContextHandle peer) {
    return call("cuCtxDisablePeerAccess", [&](Driver& driver, Lock&) {
        const auto context = driver.current();
        const int other = driver.contexts.find(peer)->device;
        if (other == context->device || !context->may_touch(other)) {
            throw Failure{kPeerAccessNotEnabled};
        }
        context->allow_peer(other, false);
    });
}
