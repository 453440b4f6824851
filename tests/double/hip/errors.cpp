// The interface: errors.
#include <array>
#include <utility>

#include "hip_call.hpp"

using namespace ficco::driver_double;

namespace {

struct ErrorName {
    Status status;
    const char* name;
    const char* text;
};

constexpr std::array kErrors{
    ErrorName{kSuccess, "hipSuccess", "no error"},
    ErrorName{kInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    ErrorName{kOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    ErrorName{kNotInitialized, "hipErrorNotInitialized", "initialization error"},
    ErrorName{17, "hipErrorInvalidDevicePointer", "invalid device pointer"},
    ErrorName{kInvalidCopyDirection, "hipErrorInvalidMemcpyDirection",
              "invalid copy direction for memcpy"},
    ErrorName{kNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    ErrorName{kInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    ErrorName{200, "hipErrorInvalidImage", "device kernel image is invalid"},
    ErrorName{kInvalidContext, "hipErrorInvalidContext", "invalid device context"},
    ErrorName{209, "hipErrorNoBinaryForGpu", "no kernel image is available for execution"},
    ErrorName{kPeerAccessUnsupported, "hipErrorPeerAccessUnsupported",
              "peer access is not supported between these two devices"},
    ErrorName{kOperatingSystem, "hipErrorOperatingSystem", "OS call failed"},
    ErrorName{kInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    ErrorName{kIllegalState, "hipErrorIllegalState",
              "the operation cannot be performed in the present state"},
    ErrorName{kNotFound, "hipErrorNotFound", "named symbol not found"},
    ErrorName{kNotReady, "hipErrorNotReady", "device not ready"},
    ErrorName{kIllegalAddress, "hipErrorIllegalAddress",
              "an illegal memory access was encountered"},
    ErrorName{kPeerAccessEnabledAlready, "hipErrorPeerAccessAlreadyEnabled",
              "peer access is already enabled"},
    ErrorName{kPeerAccessNotEnabled, "hipErrorPeerAccessNotEnabled",
              "peer access has not been enabled"},
    ErrorName{kContextIsDestroyed, "hipErrorContextIsDestroyed", "context is destroyed"},
    ErrorName{719, "hipErrorLaunchFailure", "unspecified launch failure"},
    ErrorName{kNotSupported, "hipErrorNotSupported", "operation not supported"},
    ErrorName{kCaptureUnsupported, "hipErrorStreamCaptureUnsupported",
              "operation not permitted when stream is capturing"},
    ErrorName{kCaptureInvalidated, "hipErrorStreamCaptureInvalidated",
              "operation failed due to a previous error during capture"},
    ErrorName{kCaptureMerge, "hipErrorStreamCaptureMerge",
              "operation would result in a merge of separate capture sequences"},
    ErrorName{kCaptureUnmatched, "hipErrorStreamCaptureUnmatched",
              "capture was not ended in the same stream as it began"},
    ErrorName{kCaptureUnjoined, "hipErrorStreamCaptureUnjoined",
              "capturing stream has unjoined work"},
    ErrorName{kCaptureIsolation, "hipErrorStreamCaptureIsolation",
              "dependency created on uncaptured work in another stream"},
    ErrorName{kCaptureImplicit, "hipErrorStreamCaptureImplicit",
              "operation would make the legacy stream depend on a capturing blocking stream"},
    ErrorName{kCapturedEvent, "hipErrorCapturedEvent",
              "operation not permitted on an event last recorded in a capturing stream"},
    ErrorName{kCaptureWrongThread, "hipErrorStreamCaptureWrongThread",
              "attempt to terminate a thread-local capture sequence from another thread"},
    ErrorName{999, "hipErrorUnknown", "unknown error"},
};

const ErrorName& find_error(Status status) {
    for (const ErrorName& error : kErrors) {
        if (error.status == status) return error;
    }
    return kErrors.back();
}

}  // namespace

namespace ficco::driver_double {

Status& last_error() {
    thread_local Status last = kSuccess;
    return last;
}

}  // namespace ficco::driver_double

DOUBLE_API const char* hipGetErrorName(Status status) { return find_error(status).name; }

DOUBLE_API const char* hipGetErrorString(Status status) { return find_error(status).text; }

DOUBLE_API Status hipGetLastError() { return std::exchange(last_error(), kSuccess); }

DOUBLE_API Status hipPeekAtLastError() { return last_error(); }
