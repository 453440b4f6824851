// Single calls of a device's driver.
#include "ficco/driver_calls.hpp"

#include <cstring>
#include <utility>

#include "ficco/clock.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kEndsLookNs = 50'000;
constexpr double kEndsWithinS = 2;
constexpr double kNsOfSecond = 1e9;

}  // namespace

DriverCalls::DriverCalls(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {}

DriverCalls::~DriverCalls() {
    try {
        const Gpu::Current current(*gpu_);
        for (GpuStream stream : streams_) {
            if (!ends(stream, kEndsWithinS)) return;
        }
        for (GpuGraph graph : graphs_) gpu_->delete_graph(graph);
        for (GpuEvent event : events_) gpu_->delete_event(event);
        for (GpuStream stream : streams_) gpu_->delete_stream(stream);
        for (const HostPage& page : pages_) gpu_->delete_host_page(page);
    } catch (const GpuError&) {
        // the device is lost
    }
}

GpuStream DriverCalls::new_stream(bool urgent) {
    const Gpu::Current current(*gpu_);
    return streams_.emplace_back(gpu_->new_stream(urgent));
}

GpuEvent DriverCalls::new_event() {
    const Gpu::Current current(*gpu_);
    return events_.emplace_back(gpu_->new_event(true));
}

HostPage DriverCalls::new_host_page(std::size_t bytes) {
    const Gpu::Current current(*gpu_);
    pages_.push_back(gpu_->new_host_page(bytes));
    std::memset(pages_.back().host, 0, bytes);
    return pages_.back();
}

GpuGraph DriverCalls::capture(GpuStream stream, const std::function<void()>& enqueue) {
    const Gpu::Current current(*gpu_);
    return graphs_.emplace_back(gpu_->capture(stream, enqueue));
}

void DriverCalls::copy(GpuAddress to, GpuAddress from, std::size_t bytes, GpuStream stream) {
    const Gpu::Current current(*gpu_);
    const auto length = static_cast<std::int64_t>(bytes);
    gpu_->copy({to, length, from, length, 1, length}, stream);
}

std::string DriverCalls::read(GpuAddress address, std::size_t bytes, GpuStream stream,
                              double seconds) {
    const Gpu::Current current(*gpu_);
    if (page_bytes_ < bytes) {  // seldom: to allocate may block behind a stream that waits
        page_ = new_host_page(bytes);
        page_bytes_ = bytes;
    }
    gpu_->read(page_.host, address, bytes, stream);
    if (!ends(stream, seconds)) {
        page_bytes_ = 0;  // the read may still come
        throw GpuError("a stream has not ended in " + std::to_string(seconds) + " s");
    }
    return {static_cast<const char*>(page_.host), bytes};
}

GpuKernel DriverCalls::load(std::string_view code, const std::string& entry,
                            unsigned shared_bytes) {
    const Gpu::Current current(*gpu_);
    const GpuKernel kernel = gpu_->load_code(code, entry, shared_bytes);
    const std::vector<std::size_t> sizes = gpu_->load(kernel);
    for (const std::size_t bytes : sizes) {
        if (bytes != sizeof(std::uint32_t) && bytes != sizeof(std::uint64_t)) {
            throw GpuError("the kernel " + entry + " has a parameter of " + std::to_string(bytes) +
                           " bytes; 4 or 8 are known here");
        }
    }
    parameters_[kernel] = sizes.size();
    return kernel;
}

void DriverCalls::launch(const KernelLaunch& launch, std::span<const std::uint64_t> values,
                         GpuStream stream) {
    const Gpu::Current current(*gpu_);
    std::vector<std::uint64_t> given(values.begin(), values.end());  // little-endian
    if (const std::size_t count = parameters_.at(launch.kernel); given.size() > count) {
        throw GpuError("a kernel of " + std::to_string(count) + " parameters got " +
                       std::to_string(given.size()));
    } else {
        given.resize(count);
    }
    std::vector<void*> parameters;
    for (std::uint64_t& value : given) parameters.push_back(&value);
    gpu_->launch(launch, parameters.data(), stream);
}

bool DriverCalls::ends(GpuStream stream, double seconds) {
    const Gpu::Current current(*gpu_);
    const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(seconds * kNsOfSecond);
    while (!gpu_->idle(stream)) {
        if (now_ns() > deadline) return false;
        sleep_until_ns(now_ns() + kEndsLookNs);
    }
    return true;
}

}  // namespace ficco
