// The GPU part of ficco._native. ficco/_native.pyi documents each call.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "ficco/cuda.hpp"
#include "ficco/gpu_call.hpp"
#include "ficco/gpu_probe.hpp"
#include "ficco/gpu_program.hpp"
#include "ficco/gpu_rank.hpp"
#include "ficco/gpu_window.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;
using Clock = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 2>>;

Clock times_of(GpuProgram& program) {
    static_assert(sizeof(GpuTimes) == 2 * sizeof(std::int64_t));
    auto* times = new std::vector<GpuTimes>();
    const nb::capsule owner(times,
                            [](void* data) noexcept { delete static_cast<decltype(times)>(data); });
    {
        const nb::gil_scoped_release release;
        *times = program.times();
    }
    return Clock(times->data(), {times->size(), 2}, owner);
}

// name, major, minor, PCI domain, bus and device, copy engines, flush, batch copy 12.8 and 13.0,
// peers
using CapabilityTuple = std::tuple<std::string, int, int, std::tuple<int, int, int>, int, bool,
                                   bool, bool, std::vector<bool>>;

CapabilityTuple capability_tuple(int device) {
    const cuda::Capabilities found = cuda::capabilities(device);
    return {found.name,
            found.major,
            found.minor,
            {found.pci[0], found.pci[1], found.pci[2]},
            found.copy_engines,
            found.flush_remote_writes,
            found.batch_copy_12_8,
            found.batch_copy_13_0,
            found.peers};
}

// It takes lists, because each repeated call asks, and a vector would be allocated.
bool are_well(nb::list groups, nb::list ranks) {
    for (const nb::handle group : groups) {
        if (nb::cast<const Group&>(group).failure()) return false;
    }
    for (const nb::handle rank : ranks) {
        if (nb::cast<GpuRank&>(rank).watch().missed() != 0) return false;
    }
    return groups.size() > 0;
}

std::shared_ptr<GpuProgram> new_program(std::shared_ptr<GpuRank> rank,
                                        std::shared_ptr<GpuWindow> window,
                                        const Table<std::int64_t, kOpFields>& ops,
                                        const Table<std::int64_t, kWindowSlotFields>& window_slots,
                                        const std::tuple<int, int, int>& counts,
                                        std::uint32_t digest) {
    const auto [segments, steps, slots] = counts;
    if (!rank) throw std::invalid_argument("a program needs a rank");
    const Binding binding{rank->rank(), span_of(ops), span_of(window_slots),
                          segments,     steps,        slots};
    return make<GpuProgram>(std::move(rank), std::move(window), binding, digest);
}

// function, grid, threads, bytes of shared memory, chained, parameters
using LaunchTuple = std::tuple<std::uintptr_t, std::tuple<unsigned, unsigned, unsigned>, unsigned,
                               unsigned, bool, Table<std::int64_t, kParameterFields>>;

LaunchBinding binding_of(const LaunchTuple& launch) {
    const auto& [function, grid, threads, shared_bytes, chained, parameters] = launch;
    const auto [x, y, z] = grid;
    return {{reinterpret_cast<GpuKernel>(function), {x, y, z}, threads, shared_bytes, chained},
            span_of(parameters)};
}

void set_launches(GpuProgram& program, int segment, int step, int mark,
                  const std::vector<LaunchTuple>& launches) {
    std::vector<LaunchBinding> bindings;
    for (const LaunchTuple& launch : launches) bindings.push_back(binding_of(launch));
    const nb::gil_scoped_release release;
    program.set_launches(segment, step, mark, bindings);
}

}  // namespace

void bind_gpu(nb::module_& module) {
    nb::exception<GpuError>(module, "GpuError", PyExc_RuntimeError);
    module.def("cuda_driver_version", [] { return cuda::driver().driver_version; });
    module.def("cuda_device_count", &cuda::device_count);
    module.def("cuda_capabilities", &capability_tuple, "device"_a);
    nb::class_<Gpu>(module, "Gpu")
        .def_prop_ro("no_store", &Gpu::no_store)
        .def_prop_ro("no_await", &Gpu::no_await)
        .def(
            "load_code",
            [](Gpu& gpu, const nb::bytes& code, const std::string& entry, unsigned shared_bytes) {
                const std::string_view image(code.c_str(), code.size());
                const nb::gil_scoped_release release;
                const Gpu::Current current(gpu);
                return reinterpret_cast<std::uintptr_t>(gpu.load_code(image, entry, shared_bytes));
            },
            "code"_a, "entry"_a, "shared_bytes"_a)
        .def(
            "new_window_memory",
            [](Gpu& gpu, std::size_t bytes, bool words) {
                const Gpu::Current current(gpu);
                return gpu.new_window_memory(bytes, words ? WindowPart::words : WindowPart::data);
            },
            "bytes"_a, "words"_a, WithoutGil())
        .def(
            "delete_window_memory",
            [](Gpu& gpu, GpuAddress address) {
                const Gpu::Current current(gpu);
                gpu.delete_window_memory(address);
            },
            "address"_a, WithoutGil())
        .def(
            "fill_words",
            [](Gpu& gpu, GpuAddress address, std::uint32_t value, std::size_t count) {
                const Gpu::Current current(gpu);
                gpu.fill_words(address, value, count);
            },
            "address"_a, "value"_a, "count"_a, WithoutGil())
        .def(
            "reach",
            [](Gpu& gpu, int peer) {
                const Gpu::Current current(gpu);
                gpu.reach(peer);
            },
            "peer"_a, WithoutGil())
        .def(
            "synchronize",
            [](Gpu& gpu) {
                const Gpu::Current current(gpu);
                gpu.synchronize_device();
            },
            WithoutGil())
        .def(
            "capturing",
            [](Gpu& gpu, std::uintptr_t stream) {
                const Gpu::Current current(gpu);
                return gpu.capturing(stream_at(stream));
            },
            "stream"_a, WithoutGil());
    nb::class_<GpuCall>(module, "GpuCall")
        .def(nb::new_([](std::shared_ptr<Gpu> gpu, const LaunchTuple& launch, int slots) {
                 if (!gpu) throw std::invalid_argument("a launch needs a GPU");
                 return make<GpuCall>(std::move(gpu), binding_of(launch), slots);
             }),
             "gpu"_a, "launch"_a, "slots"_a)
        .def(
            "run",
            [](GpuCall& call, const std::vector<std::uint64_t>& addresses,
               const std::vector<std::int64_t>& pitches,
               std::uintptr_t stream) { call.run(addresses, pitches, stream_at(stream)); },
            "addresses"_a, "pitches"_a, "stream"_a, WithoutGil());
    module.def("open_cuda", &cuda::open_gpu, "device"_a, WithoutGil());
    nb::class_<GpuRank>(module, "GpuRank")
        .def(nb::new_(&make<GpuRank, std::shared_ptr<Gpu>, std::shared_ptr<Group>, int>), "gpu"_a,
             "group"_a, "rank"_a)
        .def(
            "set_stop_word",
            [](GpuRank& rank, std::uintptr_t word) { rank.watch().set_stop_word(word); }, "word"_a,
            WithoutGil())
        .def(
            "forget", [](GpuRank& rank, const GpuWindow& window) { rank.watch().forget(window); },
            "window"_a, WithoutGil())
        .def_prop_ro("stop_word", [](GpuRank& rank) { return rank.watch().stop_word(); })
        .def_prop_ro("missed", [](GpuRank& rank) { return rank.watch().missed(); })
        .def_prop_ro("missed_word", [](GpuRank& rank) { return rank.watch().missed_word(); })
        .def(
            "follow",
            [](GpuRank& rank, std::uintptr_t stream) {
                const Gpu::Current current(rank.gpu());
                rank.after_last_call(stream_at(stream));
            },
            "stream"_a, WithoutGil());
    module.def("are_well", &are_well, "groups"_a, "ranks"_a);
    nb::class_<GpuWindow>(module, "GpuWindow")
        .def(nb::new_([](std::vector<GpuAddress> words, std::vector<GpuAddress> data,
                         std::size_t data_bytes, std::vector<bool> writable) {
                 return make<GpuWindow>(std::move(words), std::move(data), data_bytes,
                                        std::move(writable));
             }),
             "words"_a, "data"_a, "data_bytes"_a, "writable"_a = std::vector<bool>());
    nb::class_<GpuProbe>(module, "GpuProbe")
        .def(nb::new_([](std::shared_ptr<Gpu> gpu, std::shared_ptr<GpuWindow> window, int rank) {
                 return make<GpuProbe>(std::move(gpu), std::move(window), rank);
             }),
             "gpu"_a, "window"_a, "rank"_a)
        .def("send", &GpuProbe::send, "value"_a, WithoutGil())
        .def(
            "look",
            [](GpuProbe& probe, std::uint32_t value, double seconds) {
                std::vector<std::pair<int, int>> found;
                for (const auto& [eager, captured] : probe.look(value, seconds)) {
                    found.emplace_back(static_cast<int>(eager), static_cast<int>(captured));
                }
                return found;
            },
            "value"_a, "seconds"_a, WithoutGil());
    nb::class_<GpuProgram>(module, "GpuProgram")
        .def(nb::new_(&new_program), "rank"_a, "window"_a, "ops"_a, "window_slots"_a, "counts"_a,
             "digest"_a)
        .def("set_launches", &set_launches, "segment"_a, "step"_a, "mark"_a, "launches"_a)
        .def(
            "fits",
            [](const GpuProgram& program, const std::vector<std::uint64_t>& addresses,
               const std::vector<std::int64_t>& pitches) {
                return program.fits(addresses, pitches);
            },
            "addresses"_a, "pitches"_a)
        .def(
            "call",
            [](GpuProgram& program, int copy, std::uintptr_t stream, bool traced,
               const std::vector<std::uint64_t>& addresses,
               const std::vector<std::int64_t>& pitches) {
                program.call(copy, stream_at(stream), traced, addresses, pitches);
            },
            "copy"_a, "stream"_a, "traced"_a, "addresses"_a, "pitches"_a, WithoutGil())
        .def(
            "start",
            [](GpuProgram& program, int copy, std::uintptr_t stream, bool traced,
               const std::vector<std::uint64_t>& addresses,
               const std::vector<std::int64_t>& pitches) {
                program.start(copy, stream_at(stream), traced, addresses, pitches);
            },
            "copy"_a, "stream"_a, "traced"_a, "addresses"_a, "pitches"_a, WithoutGil())
        .def("submit", &GpuProgram::submit, "segment"_a, WithoutGil())
        .def("launch", &GpuProgram::launch, "segment"_a, WithoutGil())
        .def("mark", &GpuProgram::mark, "step"_a, WithoutGil())
        .def("stamp", &GpuProgram::stamp, "step"_a, "ended"_a, WithoutGil())
        .def("finish", &GpuProgram::finish, WithoutGil())
        .def("abandon", &GpuProgram::abandon, WithoutGil())
        .def("times", &times_of)
        .def_prop_ro("copies", &GpuProgram::copies)
        .def_prop_ro("captured", &GpuProgram::captured);
}

}  // namespace ficco::bind
