// The interface: devices and their peers.
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "hip_call.hpp"
#include "vendor.hpp"

using namespace ficco::driver_double;

namespace {

// hipDeviceProp_tR0600: its size, and the offsets of what is filled in.
constexpr std::size_t kPropertiesBytes = 1472;
constexpr std::size_t kName = 0;
constexpr std::size_t kMemoryBytes = 288;
constexpr std::size_t kSharedBytes = 296;
constexpr std::size_t kWarp = 308;
constexpr std::size_t kThreadsPerBlock = 320;
constexpr std::size_t kMajor = 360;
constexpr std::size_t kMinor = 364;
constexpr std::size_t kComputeUnits = 388;
constexpr std::size_t kPciBus = 584;
constexpr std::size_t kCopyEngines = 600;
constexpr std::size_t kThreadsPerComputeUnit = 624;
constexpr std::size_t kArch = 1160;

template <class Value>
void put(char* properties, std::size_t offset, Value value) {
    std::memcpy(properties + offset, &value, sizeof(value));
}

int pci_bus(int device) { return device + 1; }

// Only the number, without a current device.
template <class Value>
Status tell(const char* function, Value* place, Value value) {
    if (const auto fault = Faults::get().take(function)) return last_error() = *fault;
    if (place == nullptr) return last_error() = kInvalidValue;
    *place = value;
    return kSuccess;
}

}  // namespace

namespace ficco::driver_double {

void use_device(Driver& driver, int device) {
    if (!driver.device(device).context) driver.retain(device);
    std::vector<ContextHandle>& current = Driver::thread_contexts();
    current.assign(1, driver.device(device).context->handle);
}

}  // namespace ficco::driver_double

DOUBLE_API Status hipInit(unsigned flags) {
    return hip_call("hipInit", [&](Driver&, Lock&) {
        if (flags != 0) throw Failure{kInvalidValue};
    });
}

DOUBLE_API Status hipDriverGetVersion(int* version) {
    return tell("hipDriverGetVersion", version, Driver::get().version);
}

DOUBLE_API Status hipRuntimeGetVersion(int* version) {
    return tell("hipRuntimeGetVersion", version, Driver::get().version);
}

DOUBLE_API Status hipGetDeviceCount(int* count) {
    return hip_call("hipGetDeviceCount",
                    [&](Driver& driver, Lock&) { out(count) = driver.device_count(); });
}

DOUBLE_API Status hipGetDevice(int* device) {
    return hip_call("hipGetDevice",
                    [&](Driver& driver, Lock&) { out(device) = driver.current()->device; });
}

DOUBLE_API Status hipSetDevice(int device) {
    return hip_call("hipSetDevice", [&](Driver& driver, Lock&) { use_device(driver, device); });
}

DOUBLE_API Status hipGetDevicePropertiesR0600(char* properties, int device) {
    return hip_call("hipGetDevicePropertiesR0600", [&](Driver& driver, Lock&) {
        driver.device(device);
        std::memset(&out(properties), 0, kPropertiesBytes);
        std::strcpy(properties + kName, "ficco test double");
        put(properties, kMemoryBytes, Memory::total());
        put(properties, kSharedBytes, std::size_t{64} << 10);
        put(properties, kWarp, 64);
        put(properties, kThreadsPerBlock, 1024);
        put(properties, kMajor, 9);
        put(properties, kMinor, 4);
        put(properties, kThreadsPerComputeUnit, 2048);
        put(properties, kComputeUnits, static_cast<int>(kVendor.thread_slots / 2048));
        put(properties, kPciBus, pci_bus(device));
        put(properties, kCopyEngines, 16);
        std::strcpy(properties + kArch, "gfx942:sramecc+:xnack-");
    });
}

DOUBLE_API Status hipDeviceGetPCIBusId(char* text, int length, int device) {
    return hip_call("hipDeviceGetPCIBusId", [&](Driver& driver, Lock&) {
        driver.device(device);
        if (text == nullptr || length < 1) throw Failure{kInvalidValue};
        std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0",
                      static_cast<unsigned>(pci_bus(device)));
    });
}

DOUBLE_API Status hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return hip_call("hipDeviceGetStreamPriorityRange", [&](Driver&, Lock&) {
        if (least != nullptr) *least = kVendor.least_priority;
        if (greatest != nullptr) *greatest = kVendor.greatest_priority;
    });
}

DOUBLE_API Status hipDeviceGetAttribute(int* value, int attribute, int device) {
    constexpr int kThreadsOfUnit = 57;
    constexpr int kWallClockRate = 10017;  // kHz
    constexpr int kNumberOfXccs = 10018;
    return hip_call("hipDeviceGetAttribute", [&](Driver& driver, Lock&) {
        driver.device(device);
        switch (attribute) {
            case kThreadsOfUnit:
                out(value) = 2048;
                break;
            case kWallClockRate:
                out(value) = 100'000;
                break;
            case kNumberOfXccs:
                out(value) = 8;
                break;
            default:
                throw Failure{kInvalidValue};
        }
    });
}

DOUBLE_API Status hipDeviceCanAccessPeer(int* can, int device, int peer) {
    return hip_call("hipDeviceCanAccessPeer", [&](Driver& driver, Lock&) {
        driver.device(device);
        driver.device(peer);
        out(can) = driver.peers && device != peer ? 1 : 0;
    });
}

DOUBLE_API Status hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    return hip_call("hipDeviceEnablePeerAccess", [&](Driver& driver, Lock&) {
        driver.device(peer);
        const auto context = driver.current();
        if (flags != 0) throw Failure{kInvalidValue};
        if (peer == context->device) throw Failure{kInvalidDevice};
        if (!driver.peers) throw Failure{kPeerAccessUnsupported};
        if (context->may_touch(peer)) throw Failure{kPeerAccessEnabledAlready};
        context->allow_peer(peer, true);
    });
}

DOUBLE_API Status hipDeviceDisablePeerAccess(int peer) {
    return hip_call("hipDeviceDisablePeerAccess", [&](Driver& driver, Lock&) {
        driver.device(peer);
        const auto context = driver.current();
        if (peer == context->device || !context->may_touch(peer)) {
            throw Failure{kPeerAccessNotEnabled};
        }
        context->allow_peer(peer, false);
    });
}

DOUBLE_API Status hipDeviceSynchronize() {
    return hip_call("hipDeviceSynchronize", [&](Driver& driver, Lock& lock) {
        synchronize(driver, lock, driver.current());
    });
}
