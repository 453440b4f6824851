// The double's modes, with ficco's copies and signals in them.
#include <atomic>

#include "on_double.hpp"

namespace ficco::hip::test {
namespace {

constexpr std::uint32_t kSignal = 0xBEEF;

// Memory of both devices, and words of device 0.
struct Windows {
    const GpuAddress far = new_window_memory(1, 2 << 20, WindowPart::data);
    const GpuAddress own = new_window_memory(0, 2 << 20, WindowPart::data);
    const GpuAddress words = new_window_memory(0, 64, WindowPart::words);
    ~Windows() {
        delete_window_memory(1, far);
        delete_window_memory(0, own);
        delete_window_memory(0, words);
    }
};

// A kernel that has every slot of a device until it is released.
class Holding {
  public:
    explicit Holding(Gpu& gpu) : gpu_(gpu), page_(gpu.new_host_page(4 * (kBlocks + 1))) {
        std::memset(page_.host, 0, 4 * (kBlocks + 1));
        stream_ = gpu.new_stream(false);
        GpuAddress begun = page_.device + 4;
        GpuAddress go = page_.device;
        std::uint64_t limit_ns = 10'000'000'000;
        void* parameters[] = {&begun, &go, &limit_ns};
        const GpuKernel kernel = symbol<void*()>("ficcoDoubleHoldingKernel")();
        gpu.launch({kernel, {kBlocks, 1, 1}, 1024, 0}, parameters, stream_);
        while (word(1).load() == 0) std::this_thread::yield();
    }
    ~Holding() {
        release();
        drain(gpu_, stream_);
        gpu_.delete_stream(stream_);
        gpu_.delete_host_page(page_);
    }
    void release() { word(0).store(1); }

  private:
    static constexpr unsigned kBlocks = 304 * 2;

    std::atomic_ref<std::uint32_t> word(std::size_t index) {
        return std::atomic_ref(static_cast<std::uint32_t*>(page_.host)[index]);
    }

    Gpu& gpu_;
    HostPage page_;
    GpuStream stream_ = nullptr;
};

constexpr double kSoon = 0.05,
                 kAtLast = 5;  // limits in s: to see that nothing happens, that it does

// Whether a copy of so many bytes ends while a kernel has every slot of its device.
bool copies_while_held(Bench& bench, const Windows& windows, std::int64_t bytes, double seconds) {
    Holding holding(*bench.gpu);
    bench.gpu->copy(rows(windows.far, windows.own, bytes), bench.stream);
    const bool ended = idle_within(*bench.gpu, bench.stream, seconds);
    holding.release();
    drain(*bench.gpu, bench.stream);
    return ended;
}

TEST(hip_copies_need_no_compute_units) {
    Bench bench;
    const Windows windows;
    bench.gpu->constant(kSignal);
    CHECK(copies_while_held(bench, windows, 4, kAtLast));
    CHECK(copies_while_held(bench, windows, 2 << 20, kAtLast));
    // Fills and launches do.
    Holding holding(*bench.gpu);
    bench.gpu->fill(windows.own, 1, 64, bench.stream);
    CHECK(!idle_within(*bench.gpu, bench.stream, 0.05));
}

TEST(hip_copies_by_blit_kernels_wait_for_compute_units) {
    Bench bench;
    const Windows windows;
    no_cu("small_blit");
    CHECK(!copies_while_held(bench, windows, 4, kSoon));
    CHECK(!copies_while_held(bench, windows, 16 << 10, kSoon));
    CHECK(copies_while_held(bench, windows, (16 << 10) + 4, kAtLast));
    no_cu("blit");
    CHECK(!copies_while_held(bench, windows, 2 << 20, kSoon));
    no_cu("");
}

TEST(hip_copies_may_be_dropped) {
    Bench bench;
    const Windows windows;
    const GpuAddress constant = bench.gpu->constant(kSignal);
    no_cu("dropped");
    bench.gpu->copy(rows(windows.far, constant, 4), bench.stream);
    drain(*bench.gpu, bench.stream);
    CHECK_EQ(bench.read(windows.far), 0U);
    no_cu("");
    bench.gpu->copy(rows(windows.far, constant, 4), bench.stream);
    CHECK_EQ(bench.read(windows.far), kSignal);
}

std::atomic<bool> begun;  // whether the last launch of a kernel below runs

void wait_for_begin() {
    CHECK(comes_within(10, [] { return begun.load(); }));
}

std::atomic<bool> released;

void wait_for_release(void**, const unsigned*) {
    begun = true;
    while (!released) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

TEST(hip_streams_share_hardware_queues_in_turn) {
    Bench bench;
    symbol<void(unsigned)>("ficcoDoubleQueues")(2);
    std::vector<GpuStream> streams;
    for (int i = 0; i < 3; ++i) streams.push_back(bench.gpu->new_stream(false));
    streams.push_back(bench.gpu->new_stream(true));
    symbol<void(unsigned)>("ficcoDoubleQueues")(0);
    released = begun = false;
    const GpuKernel slow = new_kernel({}, wait_for_release);
    bench.gpu->launch({slow, {1, 1, 1}, 64, 0}, no_parameters, streams[0]);
    wait_for_begin();
    const GpuEvent event = bench.gpu->new_event(false);
    for (const std::size_t i : {1, 2, 3}) bench.gpu->record(event, streams[i]);
    CHECK(idle_within(*bench.gpu, streams[1], kAtLast));
    CHECK(idle_within(*bench.gpu, streams[3], kAtLast));  // of another priority
    CHECK(!bench.gpu->idle(streams[2]));                  // behind the kernel
    released = true;
    for (const GpuStream stream : streams) drain(*bench.gpu, stream);
    for (const GpuStream stream : streams) bench.gpu->delete_stream(stream);
    bench.gpu->delete_event(event);
}

// A kernel that polls a word and then reads data, with or without an acquire.
template <bool acquires>
void wait_and_read(void** parameters, const unsigned*) {
    begun = true;
    const auto at = [&](std::size_t i) { return *static_cast<std::uint32_t**>(parameters[i]); };
    const std::atomic_ref<std::uint32_t> word(*at(0));
    for (int i = 0; i < 1000 && word.load() != kSignal; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (acquires) symbol<int()>("ficcoDoubleAcquire")();
    *at(2) = word.load() == kSignal ? *at(1) : 0xDEAD;
}

// What such a kernel reads, if the signal is a copy behind the data, both from device 1.
std::uint32_t read_behind_signal(GpuAddress word, HostKernel run) {
    Bench bench;
    const auto far = open_gpu(1);
    GpuAddress data = new_window_memory(0, 64, WindowPart::data);
    GpuAddress result = new_window_memory(0, 64, WindowPart::words);
    void* parameters[] = {&word, &data, &result};
    begun = false;
    bench.gpu->launch({new_kernel({8, 8, 8}, run), {1, 1, 1}, 64, 0}, parameters, bench.stream);
    wait_for_begin();
    {
        const Gpu::Current current(*far);
        const GpuStream sender = far->new_stream(false);
        far->copy(rows(data, far->constant(7), 4), sender);
        far->copy(rows(word, far->constant(kSignal), 4), sender);
        drain(*far, sender);
        far->delete_stream(sender);
    }
    drain(*bench.gpu, bench.stream);
    const std::uint32_t seen = bench.read(result);
    CHECK_EQ(bench.read(data), 7U);  // a copy, and the next kernel, find it in any case
    delete_window_memory(0, data);
    delete_window_memory(0, result);
    return seen;
}

TEST(hip_kernels_read_old_bytes_without_an_acquire) {
    const Windows windows;
    CHECK_EQ(symbol<int()>("ficcoDoubleAcquire")(), 401);  // by no kernel
    CHECK_EQ(read_behind_signal(windows.words, wait_and_read<false>), 7U);
    symbol<void(int)>("ficcoDoubleStale")(1);
    CHECK_EQ(read_behind_signal(windows.words + 4, wait_and_read<false>), 0U);
    CHECK_EQ(read_behind_signal(windows.words + 8, wait_and_read<true>), 7U);
    // A word in cached memory is not seen itself.
    CHECK_EQ(read_behind_signal(windows.own, wait_and_read<false>), 0xDEADU);
    symbol<void(int)>("ficcoDoubleStale")(0);
}

void read_word(void** parameters, const unsigned*) {
    **static_cast<std::uint32_t**>(parameters[1]) = **static_cast<std::uint32_t**>(parameters[0]);
}

TEST(hip_kernels_acquire_when_they_begin) {
    Bench bench;
    const GpuStream other = bench.gpu->new_stream(false);
    GpuAddress data = new_window_memory(0, 64, WindowPart::data);
    GpuAddress result = new_window_memory(0, 64, WindowPart::words);
    symbol<void(int)>("ficcoDoubleStale")(1);
    released = begun = false;
    bench.gpu->launch({new_kernel({}, wait_for_release), {1, 1, 1}, 64, 0}, no_parameters,
                      bench.stream);
    wait_for_begin();
    bench.gpu->copy(rows(data, bench.gpu->constant(7), 4), other);
    drain(*bench.gpu, other);
    CHECK_EQ(*reinterpret_cast<std::uint32_t*>(data), 0U);  // as a running kernel sees it
    void* parameters[] = {&data, &result};
    bench.gpu->launch({new_kernel({8, 8}, read_word), {1, 1, 1}, 64, 0}, parameters, other);
    drain(*bench.gpu, other);
    released = true;
    drain(*bench.gpu, bench.stream);
    symbol<void(int)>("ficcoDoubleStale")(0);
    CHECK_EQ(bench.read(result), 7U);
    bench.gpu->delete_stream(other);
    delete_window_memory(0, data);
    delete_window_memory(0, result);
}

TEST(hip_streams_may_be_locked_while_a_thread_waits_for_them) {
    Bench bench;
    const GpuStream other = bench.gpu->new_stream(false);
    for (const bool locks : {true, false}) {
        symbol<void(int)>("ficcoDoubleSyncLocks")(locks ? 1 : 0);
        released = false;
        bench.gpu->launch({new_kernel({}, wait_for_release), {1, 1, 1}, 64, 0}, no_parameters,
                          bench.stream);
        std::atomic<bool> waits = false;
        std::thread waiting([&] {
            waits = true;
            symbol<int(GpuStream)>("hipStreamSynchronize")(bench.stream);
        });
        CHECK(comes_within(kAtLast, [&] { return waits.load(); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it is in the call
        CHECK(bench.gpu->idle(other));
        std::atomic<bool> asked = false;
        std::thread asking([&] { asked = !bench.gpu->idle(bench.stream); });
        CHECK_EQ(comes_within(locks ? kSoon : kAtLast, [&] { return asked.load(); }), !locks);
        released = true;
        waiting.join();
        asking.join();
    }
    bench.gpu->delete_stream(other);
}

}  // namespace
}  // namespace ficco::hip::test
