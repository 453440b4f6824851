// What the watch writes to windows once the group has failed, and when it ceases to.
#include <atomic>
#include <memory>
#include <vector>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/clock.hpp"
#include "ficco/gpu_watch.hpp"
#include "ficco/op.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr GpuAddress kData = 1 << 20;

class FilledGpu final : public FakeGpu {
  public:
    void words(std::span<const WordCommand>, GpuStream) override {}  // by the watch's thread
    void fill(GpuAddress address, unsigned char, std::size_t, GpuStream) override {
        if (address >= kData) ++fills;
    }

    std::atomic<int> fills = 0;
};

template <class Condition>
bool comes(const Condition& condition) {
    const std::int64_t deadline = now_ns() + 5'000'000'000;
    while (!condition() && now_ns() < deadline) sleep_until_ns(now_ns() + 1'000'000);
    return condition();
}

}  // namespace

TEST(a_window_that_is_forgotten_is_written_no_more) {
    const auto gpu = std::make_shared<FilledGpu>();
    const auto group = std::make_shared<Group>(2, 0.02, nullptr);
    GpuWatch watch(gpu, group, 0);
    const auto window = std::make_shared<const GpuWindow>(
        std::vector<GpuAddress>{1, 2, 3, 4},
        std::vector<GpuAddress>{kData, kData + 64, kData + 128, kData + 192}, 64);
    const int number = watch.add({window, {{kInline, 0, 5, 1, 0}}});
    // A call that waits and is never done: the word of its lane stays.
    auto* lane = reinterpret_cast<std::uint32_t*>(watch.lane_word(kInline));
    std::atomic_ref(*lane).store(GpuWatch::mark_of(number, 0));
    CHECK(comes([&] { return group->failed() && gpu->fills > 0; }));
    const int before = gpu->fills;
    CHECK(comes([&] { return gpu->fills > before; }));  // again and again
    watch.forget(*window);
    const int then = gpu->fills;
    sleep_until_ns(now_ns() + 50'000'000);
    CHECK_EQ(gpu->fills.load(), then);
}
