// Pointers of HIP, the current device of a thread, and waits of the host for a stream.
#pragma once

#include <cstdint>

#include "ficco/clock.hpp"
#include "ficco/hip.hpp"

namespace ficco::hip {

inline void* pointer(GpuAddress address) { return reinterpret_cast<void*>(address); }

// Makes a device current on the thread during its lifetime.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        call<&Table::hipGetDevice>(&before_);
        if (before_ != device) call<&Table::hipSetDevice>(device);
    }
    ~CurrentDevice() { forget(library().table.hipSetDevice(before_)); }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int before_ = 0;
};

// Allows the thread to allocate and wait while another stream is captured, without being captured.
class Uncaptured {
  public:
    Uncaptured() { call<&Table::hipThreadExchangeStreamCaptureMode>(&mode_); }
    ~Uncaptured() { forget(library().table.hipThreadExchangeStreamCaptureMode(&mode_)); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

  private:
    int mode_ = kCaptureModeRelaxed;
};

// Returns when the stream has done its work. It does not block in the library.
inline void await(Stream stream) {
    constexpr std::int64_t kLookNs = 20'000;
    for (;;) {
        const Status status = library().table.hipStreamQuery(stream);
        if (status != kNotReady) {
            check(status, name_of<&Table::hipStreamQuery>());
            return;
        }
        sleep_until_ns(now_ns() + kLookNs);
    }
}

}  // namespace ficco::hip
