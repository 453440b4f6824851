// Each call of HIP fails once with each status.
#include <algorithm>
#include <string_view>

#include "on_double.hpp"

namespace ficco::hip::test {
namespace {

// Calls whose failure nobody can be told.
constexpr std::array<std::string_view, 5> kForgotten{
    "hipStreamDestroy", "hipEventDestroy", "hipHostFree", "hipGraphDestroy", "hipGraphExecDestroy"};
// Not part of the calls below: what tells of errors and versions, and what another process calls.
constexpr std::array<std::string_view, 7> kElsewhere{
    "hipGetErrorName",     "hipGetErrorString",    "hipGetLastError",     "hipDriverGetVersion",
    "hipIpcOpenMemHandle", "hipIpcCloseMemHandle", "hipDeviceSynchronize"};
constexpr std::array kStatuses{1, 2, 600, 700, 719, 999};

void do_nothing(void**, const unsigned*) {}

// Calls every function of the table on device 1, while device 0 is current.
void call_everything(const std::string& code, GpuKernel kernel) {
    static std::uint32_t value = 0x10000000;
    call<&Table::hipSetDevice>(0);
    capabilities(1);
    reach(1, 0);  // as before
    const auto gpu = open_gpu(1, await_code());
    const GpuAddress memory = new_window_memory(1, 64, WindowPart::data);
    export_memory(1, memory);
    const Gpu::Current current(*gpu);
    const HostPage page = gpu->new_host_page(64);
    const GpuStream stream = gpu->new_stream(false);
    const GpuEvent begin = gpu->new_event(true);
    const GpuEvent end = gpu->new_event(true);
    gpu->load_code(code, "gather", 0);
    gpu->record(begin, stream);
    gpu->fill(memory, 1, 64, stream);
    const AwaitedValue word{memory, 0x01010101U, 1};
    gpu->await({{&word, 1}, page.device, page.device + 4, 7, page.device + 8, 0, {}, 0}, stream);
    gpu->copy(rows(memory + 32, memory, 32), stream);
    gpu->read(page.host, gpu->constant(value++), 4, stream);
    gpu->launch_captured(stream, [&] {
        if (!gpu->capturing(stream)) throw GpuError("nothing is captured");
        gpu->launch({kernel, {1, 1, 1}, 64, 0}, no_parameters, stream);
        gpu->captured_nodes(stream, 0);
    });
    gpu->record(end, stream);
    gpu->wait(stream, end);
    gpu->synchronize(end);
    gpu->elapsed_us(begin, end);
    drain(*gpu, stream);
    gpu->delete_event(begin);
    gpu->delete_event(end);
    gpu->delete_stream(stream);
    gpu->delete_host_page(page);
    delete_window_memory(1, memory);
}

// Fails a call of the function, and says what is thrown; empty if nothing is.
std::string failure_of(const char* function, int status, const std::string& code,
                       GpuKernel kernel) {
    fail_call(function, status);
    try {
        call_everything(code, kernel);
        return {};
    } catch (const GpuError& error) {
        return error.what();
    }
}

bool listed(std::span<const std::string_view> names, std::string_view name) {
    return std::ranges::find(names, name) != names.end();
}

void fail_function(const char* function, const std::string& code, GpuKernel kernel) {
    for (const int status : kStatuses) {
        const std::string error = failure_of(function, status, code, kernel);
        const std::string_view name = function;
        const bool unready = status == kNotReady && name == "hipStreamQuery";
        const bool unknown = status == kInvalidValue && name == "hipDeviceGetAttribute";
        if (listed(kForgotten, function) || unready || unknown) {
            CHECK_EQ(error, "");
        } else {
            const std::string expected =
                std::string(function) + " answers " + library().table.hipGetErrorName(status);
            if (error.find(expected) == std::string::npos) {
                ficco::test::give_up(__FILE__, __LINE__, expected + " is not in: " + error);
            }
        }
        CHECK_EQ(symbol<int()>("hipPeekAtLastError")(), 0);
        call_everything(code, kernel);  // as if nothing had been
    }
}

TEST(hip_failures_of_a_synchronization_are_told) {
    synchronize(1);
    fail_call("hipDeviceSynchronize", 719);
    CHECK_THROWS(GpuError, "hipDeviceSynchronize answers", synchronize(1));
    CHECK_EQ(symbol<int()>("hipPeekAtLastError")(), 0);
    synchronize(1);
}

TEST(hip_failures_of_calls_are_told) {
    const std::string code = code_object("gather");
    const GpuKernel kernel = new_kernel({}, do_nothing);
    const auto fail = [&](const char* name) {
        if (!listed(kElsewhere, name)) fail_function(name, code, kernel);
    };
#define FICCO_FAIL(result, name, arguments) fail(#name);
    FICCO_HIP_FUNCTIONS(FICCO_FAIL)
#undef FICCO_FAIL
}

TEST(hip_failures_with_memory_of_other_processes_are_told) {
    for (const int status : kStatuses) {
        const std::string name = library().table.hipGetErrorName(status);
        fail_call("hipIpcOpenMemHandle", status);
        const std::string opened =
            ficco::test::thrown<GpuError>(__FILE__, __LINE__, [] { open_memory(1, IpcHandle{}); });
        CHECK(opened.starts_with("hipIpcOpenMemHandle answers " + name));
        fail_call("hipIpcCloseMemHandle", status);
        const std::string closed =
            ficco::test::thrown<GpuError>(__FILE__, __LINE__, [] { close_memory(1, 4096); });
        CHECK(closed.starts_with("hipIpcCloseMemHandle answers " + name));
        CHECK_EQ(symbol<int()>("hipPeekAtLastError")(), 0);
    }
}

TEST(hip_failures_of_a_capture_end_it) {
    Bench bench;
    const char* const calls[] = {"hipStreamEndCapture", "hipGraphInstantiateWithFlags",
                                 "hipGraphLaunch"};
    for (const char* function : calls) {
        fail_call(function, 2);
        const GpuStream stream = bench.gpu->new_stream(false);
        CHECK_THROWS(GpuError, "hipErrorOutOfMemory", bench.gpu->launch_captured(stream, [] {}));
        bench.gpu->delete_stream(stream);
        bench.gpu->launch_captured(bench.stream, [] {});
    }
    drain(*bench.gpu, bench.stream);
}

}  // namespace
}  // namespace ficco::hip::test
