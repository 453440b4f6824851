// A read and its thread.
#include "ficco/gpu_reader.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/thread.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kEndLookNs = 200'000;
constexpr std::int64_t kStopLookNs = 1'000'000;

}  // namespace

// Host memory that a GPU copies to.
class GpuReader::Page {
  public:
    Page(std::shared_ptr<Gpu> gpu, std::size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
        const Gpu::Current current(*gpu_);
        page_ = gpu_->new_host_page(bytes);
    }
    ~Page() {
        try {
            const Gpu::Current current(*gpu_);
            gpu_->delete_host_page(page_);
        } catch (const GpuError&) {
            // the device and its memory are lost
        }
    }
    Page(const Page&) = delete;
    Page& operator=(const Page&) = delete;

    void* host() const noexcept { return page_.host; }
    std::size_t bytes() const noexcept { return bytes_; }

  private:
    const std::shared_ptr<Gpu> gpu_;
    const std::size_t bytes_;
    HostPage page_{};
};

struct GpuReader::Read {
    Read(std::shared_ptr<Page> into, GpuAddress from, std::shared_ptr<const GpuWay> by)
        : page(std::move(into)), address(from), way(std::move(by)) {}

    const std::shared_ptr<Page> page;
    const GpuAddress address;
    std::shared_ptr<const GpuWay> way;  // null when it has ended
    std::string refusal;
    Word ended{0};
};

// A stream only for the read: commands on the way's own stream must run while the read is blocked.
class GpuReader::Stream {
  public:
    explicit Stream(Gpu& gpu) : gpu_(gpu), stream_(gpu.new_stream(true)) {}
    ~Stream() { gpu_.delete_stream(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    GpuStream get() const noexcept { return stream_; }

  private:
    Gpu& gpu_;
    const GpuStream stream_;
};

GpuReader::GpuReader(std::shared_ptr<Gpu> gpu, std::size_t bytes)
    : page_(std::make_shared<Page>(std::move(gpu), bytes)) {}

bool GpuReader::stands() const noexcept {
    return last_ && last_->ended.load(std::memory_order_acquire) == 0;
}

const void* GpuReader::read(std::shared_ptr<const GpuWay> way, GpuAddress address, double within_s,
                            const Word& stop) {
    if (stands()) return nullptr;  // it may still write to the page
    const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(within_s * 1e9);
    const auto read = std::make_shared<Read>(page_, address, std::move(way));
    try {
        Thread::start_detached("ficco reader", [read] { run(*read); });
    } catch (const std::runtime_error&) {
        return nullptr;  // no thread can be started
    }
    last_ = read;
    while (stands()) {
        const std::int64_t now = now_ns();
        if (now > deadline || stop.load(std::memory_order_acquire) != 0) return nullptr;
        futex_wait(read->ended, 0, std::min(deadline, now + kStopLookNs) + 1);
    }
    if (!read->refusal.empty()) throw GpuError(read->refusal);
    return page_->host();
}

void GpuReader::run(Read& read) noexcept {
    try {
        Gpu& gpu = *read.way->gpu;
        const Gpu::Current current(gpu);
        const Stream stream(gpu);
        gpu.read(read.page->host(), read.address, read.page->bytes(), stream.get());
        while (!gpu.idle(stream.get())) sleep_until_ns(now_ns() + kEndLookNs);
    } catch (const GpuError& error) {
        read.refusal = error.what();
    }
    read.way.reset();  // may destroy its stream, before the end of the read is visible
    read.ended.store(1, std::memory_order_release);
    futex_wake_all(read.ended);
}

}  // namespace ficco
