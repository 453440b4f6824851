// Single calls of a device's driver in ficco._native. ficco/_native.pyi documents each call.
#include "ficco/driver_calls.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;

// address, value, number
using AwaitedTuple = std::tuple<GpuAddress, std::uint32_t, std::uint32_t>;
// stop, lane, missed
using WaitWords = std::tuple<GpuAddress, GpuAddress, GpuAddress>;

std::uintptr_t handle_of(void* object) { return reinterpret_cast<std::uintptr_t>(object); }

void await(DriverCalls& calls, const std::vector<AwaitedTuple>& words, const WaitWords& of_host,
           double limit_s, GpuAddress data, std::size_t data_bytes, std::uintptr_t stream) {
    constexpr double kNs = 1e9;
    std::vector<AwaitedValue> awaited;
    for (const auto& [address, value, number] : words) awaited.push_back({address, value, number});
    const auto& [stop, lane, missed] = of_host;
    const KernelWait wait{.words = awaited,
                          .stop = stop,
                          .lane = lane,
                          .mark = 1,
                          .missed = missed,
                          .limit_ns = static_cast<std::uint64_t>(limit_s * kNs),
                          .data = {data, data},
                          .data_bytes = data_bytes};
    const nb::gil_scoped_release release;
    const Gpu::Current current(calls.gpu());
    calls.gpu().await(wait, stream_at(stream));
}

void command(DriverCalls& calls, WordCommand::Kind kind, GpuAddress address, std::uint32_t value,
             std::uintptr_t stream) {
    const WordCommand only{kind, address, value};
    const Gpu::Current current(calls.gpu());
    calls.gpu().words({&only, 1}, stream_at(stream));
}

}  // namespace

void bind_driver_calls(nb::module_& module) {
    nb::class_<DriverCalls>(module, "DriverCalls")
        .def(nb::new_([](std::shared_ptr<Gpu> gpu) {
                 if (!gpu) throw std::invalid_argument("calls need a GPU");
                 return make<DriverCalls>(std::move(gpu));
             }),
             "gpu"_a)
        .def_prop_ro("waits_by_streams",
                     [](DriverCalls& calls) { return calls.gpu().facts().words; })
        .def_prop_ro("extent",
                     [](DriverCalls& calls) {
                         const Gpu::Current current(calls.gpu());
                         const DeviceExtent extent = calls.gpu().extent();
                         return std::tuple(extent.processors, extent.threads_of_processor,
                                           extent.ticks_a_second);
                     })
        .def_prop_ro("one_queue", [](DriverCalls& calls) { return calls.gpu().one_queue(); })
        .def(
            "new_stream",
            [](DriverCalls& calls, bool urgent) { return handle_of(calls.new_stream(urgent)); },
            "urgent"_a)
        .def("new_event", [](DriverCalls& calls) { return handle_of(calls.new_event()); })
        .def(
            "new_host_page",
            [](DriverCalls& calls, std::size_t bytes) {
                const HostPage page = calls.new_host_page(bytes);
                return std::pair(handle_of(page.host), page.device);
            },
            "bytes"_a)
        .def(
            "copy",
            [](DriverCalls& calls, GpuAddress to, GpuAddress from, std::size_t bytes,
               std::uintptr_t stream) { calls.copy(to, from, bytes, stream_at(stream)); },
            "to"_a, "from_"_a, "bytes"_a, "stream"_a, WithoutGil())
        .def(
            "constant",
            [](DriverCalls& calls, std::uint32_t value) {
                const Gpu::Current current(calls.gpu());
                return calls.gpu().constant(value);
            },
            "value"_a, WithoutGil())
        .def(
            "write",
            [](DriverCalls& calls, GpuAddress address, std::uint32_t value, std::uintptr_t stream) {
                command(calls, WordCommand::Kind::write, address, value, stream);
            },
            "address"_a, "value"_a, "stream"_a, WithoutGil())
        .def(
            "wait",
            [](DriverCalls& calls, GpuAddress address, std::uint32_t value, std::uintptr_t stream) {
                command(calls, WordCommand::Kind::wait, address, value, stream);
            },
            "address"_a, "value"_a, "stream"_a, WithoutGil())
        .def("await_", &await, "words"_a, "of_host"_a, "limit_s"_a, "data"_a, "data_bytes"_a,
             "stream"_a)
        .def(
            "fill",
            [](DriverCalls& calls, GpuAddress address, unsigned char byte, std::size_t bytes,
               std::uintptr_t stream) {
                const Gpu::Current current(calls.gpu());
                calls.gpu().fill(address, byte, bytes, stream_at(stream));
            },
            "address"_a, "byte"_a, "bytes"_a, "stream"_a, WithoutGil())
        .def(
            "read",
            [](DriverCalls& calls, GpuAddress address, std::size_t bytes, std::uintptr_t stream,
               double seconds) {
                std::string found;
                {
                    const nb::gil_scoped_release release;
                    found = calls.read(address, bytes, stream_at(stream), seconds);
                }
                return nb::bytes(found.data(), found.size());
            },
            "address"_a, "bytes"_a, "stream"_a, "seconds"_a)
        .def(
            "load",
            [](DriverCalls& calls, const nb::bytes& code, const std::string& entry,
               unsigned shared_bytes) {
                const std::string_view image(code.c_str(), code.size());
                const nb::gil_scoped_release release;
                return handle_of(calls.load(image, entry, shared_bytes));
            },
            "code"_a, "entry"_a, "shared_bytes"_a)
        .def(
            "launch",
            [](DriverCalls& calls, std::uintptr_t kernel, std::tuple<unsigned, unsigned> shape,
               unsigned shared_bytes, const std::vector<std::uint64_t>& values,
               std::uintptr_t stream) {
                const auto [blocks, threads] = shape;
                calls.launch(
                    {reinterpret_cast<GpuKernel>(kernel), {blocks, 1, 1}, threads, shared_bytes},
                    values, stream_at(stream));
            },
            "kernel"_a, "shape"_a, "shared_bytes"_a, "values"_a, "stream"_a, WithoutGil())
        .def(
            "record",
            [](DriverCalls& calls, std::uintptr_t event, std::uintptr_t stream) {
                const Gpu::Current current(calls.gpu());
                calls.gpu().record(reinterpret_cast<GpuEvent>(event), stream_at(stream));
            },
            "event"_a, "stream"_a, WithoutGil())
        .def(
            "elapsed_us",
            [](DriverCalls& calls, std::uintptr_t begin, std::uintptr_t end) {
                const Gpu::Current current(calls.gpu());
                return calls.gpu().elapsed_us(reinterpret_cast<GpuEvent>(begin),
                                              reinterpret_cast<GpuEvent>(end));
            },
            "begin"_a, "end"_a, WithoutGil())
        .def(
            "ends",
            [](DriverCalls& calls, std::uintptr_t stream, double seconds) {
                return calls.ends(stream_at(stream), seconds);
            },
            "stream"_a, "seconds"_a, WithoutGil())
        .def(
            "capture",
            [](DriverCalls& calls, std::uintptr_t stream, const std::function<void()>& enqueue) {
                return handle_of(calls.capture(stream_at(stream), enqueue));
            },
            "stream"_a, "enqueue"_a)
        .def(
            "replay",
            [](DriverCalls& calls, std::uintptr_t graph, std::uintptr_t stream) {
                const Gpu::Current current(calls.gpu());
                calls.gpu().replay(reinterpret_cast<GpuGraph>(graph), stream_at(stream));
            },
            "graph"_a, "stream"_a, WithoutGil());
}

}  // namespace ficco::bind
