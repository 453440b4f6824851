// Waits for words by a kernel, on the double, which runs the kernel by itself.
#include <algorithm>
#include <vector>

#include "on_double.hpp"

namespace ficco::hip::test {
namespace {

constexpr std::uint32_t kMark = 77;
constexpr std::size_t kWords = 70;  // three launches

struct Waits {
    Waits() {
        gpu = open_gpu(0, await_code());
        const Gpu::Current current(*gpu);
        stream = gpu->new_stream(false);
        page = gpu->new_host_page(64);
        std::fill_n(host(), 16, 0U);
        memory = new_window_memory(0, 4096, WindowPart::words);
        for (std::size_t i = 0; i < kWords; ++i) {
            const auto number = static_cast<std::uint32_t>(i + 1);
            words.push_back({memory + 4 * i, number % 3, number});
        }
    }
    ~Waits() {
        const Gpu::Current current(*gpu);
        gpu->delete_stream(stream);
        gpu->delete_host_page(page);
        delete_window_memory(0, memory);
    }

    std::uint32_t* host() const { return static_cast<std::uint32_t*>(page.host); }
    std::atomic_ref<std::uint32_t> host(int place) const { return std::atomic_ref(host()[place]); }
    std::atomic_ref<std::uint32_t> word(std::size_t i) const {  // the double's memory is the host's
        return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(memory + 4 * i));
    }
    GpuAddress data() const { return memory + 2048; }
    void await(std::uint64_t limit_ns) const {
        const Gpu::Current current(*gpu);
        gpu->await({words,
                    page.device,
                    page.device + 4,
                    kMark,
                    page.device + 8,
                    limit_ns,
                    {data(), data() + 64},
                    32},
                   stream);
    }
    bool idle(double seconds) const {
        const Gpu::Current current(*gpu);
        return idle_within(*gpu, stream, seconds);
    }

    std::shared_ptr<Gpu> gpu;
    GpuStream stream = nullptr;
    HostPage page{};  // the stop word, the lane's word, the missed word
    GpuAddress memory = 0;
    std::vector<AwaitedValue> words;
};

TEST(hip_a_kernel_waits_for_all_words) {
    const Waits waits;
    waits.await(10'000'000'000);
    CHECK(comes_within(5, [&] { return waits.host(1).load() == kMark; }));
    CHECK(!waits.idle(0.02));
    for (std::size_t i = 0; i + 1 < kWords; ++i) waits.word(i) = waits.words[i].value;
    CHECK(!waits.idle(0.02));
    waits.word(kWords - 1) = waits.words[kWords - 1].value;
    CHECK(waits.idle(5));
    CHECK_EQ(waits.host(1).load(), 0U);
    CHECK_EQ(waits.host(2).load(), 0U);
    CHECK_EQ(*reinterpret_cast<std::uint32_t*>(waits.data()), 0U);
}

TEST(hip_a_kernel_gives_up_and_tells) {
    for (const bool stopped : {false, true}) {
        const Waits waits;
        for (std::size_t i = 0; i < kWords; ++i) {
            if (i != 40) waits.word(i) = waits.words[i].value;
        }
        waits.word(40) = 9;
        waits.await(stopped ? 60'000'000'000 : 20'000'000);
        if (stopped) {
            CHECK(!waits.idle(0.05));
            waits.host(0) = 1;
        }
        CHECK(waits.idle(5));
        CHECK_EQ(waits.host(2).load(), 41U);
        CHECK_EQ(waits.host(1).load(), 0U);
        for (const GpuAddress range : {waits.data(), waits.data() + 64}) {
            for (GpuAddress at = range; at < range + 32; at += 4) {
                CHECK_EQ(*reinterpret_cast<std::uint32_t*>(at), 0xFFFFFFFFU);
            }
            CHECK_EQ(*reinterpret_cast<std::uint32_t*>(range + 32), 0U);
        }
    }
}

TEST(hip_code_with_other_parameters_is_refused) {
    AwaitCode other = await_code();
    CHECK_THROWS(GpuError, "no code object", open_gpu(0, {"text", 0}));
    const std::string_view size = "\xa5.size\x08";  // of a parameter, in MessagePack
    const std::size_t at = other.code.find(size);
    CHECK(at != std::string::npos);
    other.code[at + size.size() - 1] = 4;
    CHECK_THROWS(GpuError, "has other parameters than the core passes", open_gpu(0, other));
}

TEST(hip_a_library_that_does_not_know_the_number_of_l2s_serves) {
    fail_call("hipDeviceGetAttribute", 1);
    const auto gpu = open_gpu(0, await_code());
    CHECK(gpu->no_await().empty());
}

}  // namespace
}  // namespace ficco::hip::test
