// One device of HIP as a Gpu, on the double.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "on_double.hpp"

namespace ficco::hip::test {
namespace {

constexpr std::uint32_t kValue = 0xC0FFEE;

int current_device() {
    int device = -1;
    call<&Table::hipGetDevice>(&device);
    return device;
}

void add_one(void** parameters, const unsigned* shape) {
    auto* word = *static_cast<std::uint32_t**>(parameters[0]);
    *word += *static_cast<std::uint32_t*>(parameters[1]) + shape[3];
}

void run_stood_in(void** parameters, const unsigned*) {
    **static_cast<std::uint32_t**>(parameters[0]) = kValue;
}

TEST(hip_tells_what_a_device_is) {
    CHECK_EQ(device_count(), 4);
    CHECK_EQ(library().version / 100000, 701);
    const Capabilities found = capabilities(2);
    CHECK_EQ(found.name, "ficco test double");
    CHECK_EQ(found.arch, "gfx942");
    CHECK((found.pci == std::array<int, 3>{0, 3, 0}));
    CHECK_EQ(found.compute_units, 304);
    CHECK_EQ(found.warp, 64);
    CHECK_EQ(found.memory_bytes, std::size_t{4} << 30);
    CHECK_EQ(found.shared_bytes, std::size_t{64} << 10);
    CHECK((found.peers == std::vector<bool>{true, true, true, true}));
    CHECK_THROWS(GpuError, "no HIP device 4; the process has 4", open_gpu(4));
    CHECK_THROWS(GpuError, "no HIP device -1", capabilities(-1));
}

TEST(hip_current_device_is_restored) {
    const auto one = open_gpu(1);
    const auto two = open_gpu(2);
    call<&Table::hipSetDevice>(3);
    {
        const Gpu::Current outer(*one);
        CHECK_EQ(current_device(), 1);
        {
            const Gpu::Current inner(*two);
            CHECK_EQ(current_device(), 2);
            const Gpu::Current again(*two);
            CHECK_EQ(current_device(), 2);
        }
        CHECK_EQ(current_device(), 1);
    }
    CHECK_EQ(current_device(), 3);
    delete_window_memory(2, new_window_memory(2, 64, WindowPart::words));
    CHECK_EQ(current_device(), 3);
}

TEST(hip_copies_bytes_to_peers) {
    Bench bench;
    const GpuAddress own = new_window_memory(0, 4096, WindowPart::data);
    const GpuAddress far = new_window_memory(1, 4096, WindowPart::data);
    CHECK_EQ(bench.read(own + 4092), 0U);  // new memory is zero
    const auto before = count("memcpy_bytes");
    bench.gpu->fill(own, 7, 4096, bench.stream);
    bench.gpu->copy(rows(far, own, 1024, 3), bench.stream);
    CHECK_EQ(bench.read(far + 3068), 0x07070707U);
    CHECK_EQ(bench.read(far + 3072), 0U);
    bench.gpu->copy(rows(far, own, 64, 0), bench.stream);
    bench.gpu->fill(own, 9, 0, bench.stream);
    CHECK_THROWS(GpuError, "3 rows that are not adjacent; copy each row",
                 bench.gpu->copy({far, 64, own, 128, 3, 64}, bench.stream));
    CHECK_EQ(count("memcpy_bytes") - before, 3072U + 8U);
    delete_window_memory(0, own);
    delete_window_memory(1, far);
    CHECK_THROWS(GpuError, "hipFree answers hipErrorInvalidValue", delete_window_memory(1, far));
}

TEST(hip_streams_and_events_keep_order) {
    Bench bench;
    const GpuAddress memory = new_window_memory(0, 64, WindowPart::data);
    const GpuEvent begin = bench.gpu->new_event(true);
    const GpuEvent end = bench.gpu->new_event(true);
    const GpuStream other = bench.gpu->new_stream(true);
    int priority = 0;
    symbol<int(GpuStream, int*)>("hipStreamGetPriority")(other, &priority);
    CHECK_EQ(priority, -1);
    bench.gpu->record(begin, bench.stream);
    symbol<int(GpuStream, double)>("ficcoDoubleStallStream")(bench.stream, 0.05);
    bench.gpu->fill(memory, 1, 64, bench.stream);
    bench.gpu->record(end, bench.stream);
    CHECK(!bench.gpu->idle(bench.stream));
    bench.gpu->wait(other, end);
    bench.gpu->fill(memory, 2, 64, other);
    drain(*bench.gpu, other);
    CHECK_EQ(bench.read(memory), 0x02020202U);
    bench.gpu->synchronize(end);
    CHECK_LE(49e3, bench.gpu->elapsed_us(begin, end));
    bench.gpu->delete_event(begin);
    bench.gpu->delete_event(end);
    bench.gpu->delete_stream(other);
    delete_window_memory(0, memory);
}

TEST(hip_constants_stay) {
    Bench bench;
    const GpuStream captured = bench.gpu->new_stream(false);
    const GpuAddress word = bench.gpu->constant(kValue);
    CHECK_EQ(bench.read(word), kValue);
    CHECK_EQ(bench.gpu->constant(kValue), word);
    constexpr int kGlobal = 0;
    call<&Table::hipStreamBeginCapture>(static_cast<Stream>(captured), kGlobal);
    const GpuAddress next = bench.gpu->constant(kValue + 1);
    CHECK(bench.gpu->capturing(captured));
    Graph graph = nullptr;
    call<&Table::hipStreamEndCapture>(static_cast<Stream>(captured), &graph);
    CHECK_EQ(next, word + 4);
    CHECK_EQ(bench.read(next), kValue + 1);
    CHECK_EQ(bench.read(word), kValue);
    std::vector<GpuAddress> many;
    for (std::uint32_t value = 1; value < 5000; ++value) many.push_back(bench.gpu->constant(value));
    CHECK_EQ(bench.read(many.front()), 1U);
    CHECK_EQ(bench.read(many.back()), 4999U);
    const auto second = open_gpu(1);
    const Gpu::Current current(*second);
    CHECK(second->constant(kValue) != word);
    bench.gpu->delete_stream(captured);
}

TEST(hip_reaches_pages_of_the_host) {
    Bench bench;
    const HostPage page = bench.gpu->new_host_page(4096);
    const GpuAddress word = bench.gpu->constant(kValue);
    bench.gpu->copy(rows(page.device + 8, word, 4), bench.stream);
    drain(*bench.gpu, bench.stream);
    CHECK_EQ(static_cast<std::uint32_t*>(page.host)[2], kValue);
    bench.gpu->delete_host_page(page);
}

TEST(hip_captures_into_graphs) {
    Bench bench;
    const GpuAddress own = new_window_memory(0, 64, WindowPart::data);
    const GpuAddress far = new_window_memory(1, 64, WindowPart::words);
    const GpuKernel kernel = new_kernel({8, 4}, add_one);
    const std::uint32_t two = 2;
    CapturedNodes nodes{};
    CHECK(!bench.gpu->capturing(bench.stream));
    bench.gpu->launch_captured(bench.stream, [&] {
        CHECK(bench.gpu->capturing(bench.stream));
        CHECK_EQ(bench.gpu->captured_nodes(bench.stream, 0).total, 0U);
        void* parameters[] = {const_cast<GpuAddress*>(&own), const_cast<std::uint32_t*>(&two)};
        bench.gpu->launch({kernel, {1, 1, 1}, 3, 0}, parameters, bench.stream);
        bench.gpu->copy(rows(far, own, 4), bench.stream);
        bench.gpu->copy(rows(far + 4, bench.gpu->constant(kValue), 4), bench.stream);
        nodes = bench.gpu->captured_nodes(bench.stream, 0);
        CHECK_EQ(bench.gpu->captured_nodes(bench.stream, 2).copies, 1U);
        CHECK_EQ(bench.gpu->captured_nodes(bench.stream, 1).kernels, 0U);
        CHECK_EQ(bench.gpu->captured_nodes(bench.stream, Gpu::kAllKnown).copies, 0U);
    });
    CHECK_EQ(nodes.total, 3U);
    CHECK_EQ(nodes.copies, 2U);
    CHECK_EQ(nodes.kernels, 1U);
    CHECK(nodes.capture != 0);
    CHECK_EQ(bench.read(far), 5U);
    CHECK_EQ(bench.read(far + 4), kValue);
    CHECK_THROWS(GpuError, "not captured any more", bench.gpu->captured_nodes(bench.stream, 0));
    CHECK_THROWS(GpuError, "an own error",
                 bench.gpu->launch_captured(bench.stream, [] { throw GpuError("an own error"); }));
    CHECK(!bench.gpu->capturing(bench.stream));
    bench.gpu->launch_captured(bench.stream, [] {});
    drain(*bench.gpu, bench.stream);
    delete_window_memory(0, own);
    delete_window_memory(1, far);
}

TEST(hip_launches_kernels_of_code_objects) {
    Bench bench;
    const GpuAddress word = new_window_memory(0, 4, WindowPart::words);
    const std::string code = code_object("gather");
    const GpuKernel kernel = bench.gpu->load_code(code, "gather", 4096);
    CHECK((bench.gpu->load(kernel) == std::vector<std::size_t>{8}));
    constexpr std::size_t kBytes[] = {8};
    const int stood = symbol<int(void*, const std::size_t*, int, HostKernel)>(
        "ficcoDoubleStandInWith")(kernel, kBytes, 1, run_stood_in);
    CHECK_EQ(stood, 0);
    void* parameters[] = {const_cast<GpuAddress*>(&word)};
    bench.gpu->launch({kernel, {2, 1, 1}, 256, 4096}, parameters, bench.stream);
    CHECK_EQ(bench.read(word), kValue);
    CHECK_THROWS(GpuError, "no code object", bench.gpu->load_code(".version 8.0", "gather", 0));
    CHECK_THROWS(GpuError, "asks for 65537 bytes of shared memory, and the device has 65536",
                 bench.gpu->load_code(code, "gather", 65537));
    CHECK_THROWS(GpuError, "no kernel scatter", bench.gpu->load_code(code, "scatter", 0));
    CHECK_THROWS(GpuError, "kernel gather is not for AMD devices",
                 bench.gpu->load_code(code_object("gather", 190), "gather", 0));
    CHECK_THROWS(GpuError, "before the end of the previous kernel",
                 bench.gpu->launch({kernel, {2, 1, 1}, 256, 0, true}, parameters, bench.stream));
    delete_window_memory(0, word);
}

TEST(hip_lacks_what_only_cuda_has) {
    Bench bench;
    const GpuFacts facts = bench.gpu->facts();
    CHECK(!facts.words && !facts.tensor_maps && !facts.chained && !facts.apart);
    CHECK(!bench.gpu->no_store().empty());
    CHECK_THROWS(GpuError, "HIP has no stores and waits of streams",
                 bench.gpu->words({}, bench.stream));
    CHECK_THROWS(GpuError, "HIP has no kernel that stores", bench.gpu->store({}, bench.stream));
    CHECK(!bench.gpu->no_await().empty());
    CHECK_THROWS(GpuError, "HIP has no kernel that waits for words: no code",
                 bench.gpu->await({}, bench.stream));
    CHECK_THROWS(GpuError, "HIP has no tensor maps", bench.gpu->encode({}));
    CHECK_THROWS(GpuError, "HIP has no second context", bench.gpu->apart());
    CHECK_THROWS(GpuError, "another library has loaded; launch it by that library",
                 bench.gpu->load(nullptr));
}

constexpr const char* kHandle = "FICCO_TEST_IPC_HANDLE";

// In another process: reads a word of the parent's device 1, and answers in the next one.
void answer(const std::string& hex) {
    IpcHandle handle{};
    for (std::size_t i = 0; i < sizeof(handle); ++i) {
        handle.reserved[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
    }
    Bench bench;
    const GpuAddress far = open_memory(0, handle);
    CHECK_EQ(bench.read(far), kValue);
    bench.gpu->copy(rows(far + 4, bench.gpu->constant(kValue + 9), 4), bench.stream);
    drain(*bench.gpu, bench.stream);
    close_memory(0, far);
    CHECK_THROWS(GpuError, "hipIpcCloseMemHandle answers", close_memory(0, far));
}

TEST(hip_memory_is_opened_by_another_process) {
    if (const char* hex = std::getenv(kHandle); hex != nullptr) {
        answer(hex);
        return;
    }
    Bench bench;
    const GpuAddress memory = new_window_memory(1, 64, WindowPart::data);
    bench.gpu->copy(rows(memory, bench.gpu->constant(kValue), 4), bench.stream);
    drain(*bench.gpu, bench.stream);
    const IpcHandle handle = export_memory(1, memory);
    CHECK_THROWS(GpuError, "hipIpcOpenMemHandle answers hipErrorInvalidContext",
                 open_memory(0, handle));
    std::string hex;
    for (const char byte : handle.reserved) {
        constexpr const char* kDigits = "0123456789abcdef";
        hex += {kDigits[static_cast<unsigned char>(byte) >> 4], kDigits[byte & 15]};
    }
    setenv(kHandle, hex.c_str(), 1);
    const char* arguments[] = {"child", "hip_memory_is_opened_by_another_process", nullptr};
    pid_t child = 0;
    CHECK_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments),
                         environ),
             0);
    unsetenv(kHandle);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(bench.read(memory + 4), kValue + 9);
    delete_window_memory(1, memory);
}

}  // namespace
}  // namespace ficco::hip::test
