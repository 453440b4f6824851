// Single calls of a device's driver, for probes of the machine. Programs do not use it: they submit
// their commands by gpu_program.hpp, with the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ficco/gpu.hpp"

namespace ficco {

// Streams, events, pages and graphs that it makes live as long as the object. They stay allocated
// if the device does not end its work in time. All calls throw GpuError.
class DriverCalls {
  public:
    explicit DriverCalls(std::shared_ptr<Gpu> gpu);
    ~DriverCalls();
    DriverCalls(const DriverCalls&) = delete;
    DriverCalls& operator=(const DriverCalls&) = delete;

    Gpu& gpu() { return *gpu_; }

    GpuStream new_stream(bool urgent);
    GpuEvent new_event();  // timed
    HostPage new_host_page(std::size_t bytes);
    GpuGraph capture(GpuStream stream, const std::function<void()>& enqueue);

    void copy(GpuAddress to, GpuAddress from, std::size_t bytes, GpuStream stream);
    // Returns bytes of the device's memory, after the earlier work of the stream. Throws if that
    // does not end in `seconds`.
    std::string read(GpuAddress address, std::size_t bytes, GpuStream stream, double seconds);

    // A kernel whose parameters have 4 or 8 bytes each. Those after the last value are 0.
    GpuKernel load(std::string_view code, const std::string& entry, unsigned shared_bytes);
    void launch(const KernelLaunch& launch, std::span<const std::uint64_t> values,
                GpuStream stream);

    // Whether the stream has completed all commands in this time.
    bool ends(GpuStream stream, double seconds);

  private:
    const std::shared_ptr<Gpu> gpu_;
    std::vector<GpuStream> streams_;
    std::vector<GpuEvent> events_;
    std::vector<HostPage> pages_;
    std::vector<GpuGraph> graphs_;
    std::map<GpuKernel, std::size_t> parameters_;  // number of each kernel's
    HostPage page_{};                              // of `read`
    std::size_t page_bytes_ = 0;
};

}  // namespace ficco
