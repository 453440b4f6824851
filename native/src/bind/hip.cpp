// AMD's devices in ficco._native. ficco/_native.pyi documents each call.
#include "ficco/hip.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "ficco/hip_device.hpp"
#include "ficco/hip_memory.hpp"

namespace ficco::bind {

namespace {

using namespace nb::literals;

// name, arch, PCI domain, bus and device, compute units, threads of a wavefront, bytes of memory
// and of shared memory, peers
using HipTuple = std::tuple<std::string, std::string, std::tuple<int, int, int>, int, int,
                            std::size_t, std::size_t, std::vector<bool>>;

HipTuple hip_tuple(int device) {
    const hip::Capabilities found = hip::capabilities(device);
    return {found.name,          found.arch, {found.pci[0], found.pci[1], found.pci[2]},
            found.compute_units, found.warp, found.memory_bytes,
            found.shared_bytes,  found.peers};
}

}  // namespace

void bind_hip(nb::module_& module) {
    module.def("hip_driver_version", [] { return hip::library().version; });
    module.def("hip_library", [] { return hip::library().path; });
    module.def("hip_device_count", &hip::device_count);
    module.def("hip_capabilities", &hip_tuple, "device"_a);
    module.def(
        "open_hip",
        [](int device, const nb::bytes& await_code, unsigned shared_bytes) {
            const hip::AwaitCode code{{await_code.c_str(), await_code.size()}, shared_bytes};
            const nb::gil_scoped_release release;
            return hip::open_gpu(device, code);
        },
        "device"_a, "await_code"_a = nb::bytes("", 0), "shared_bytes"_a = 0U);
    module.def(
        "hip_export_memory",
        [](int device, GpuAddress address) {
            const hip::IpcHandle handle = hip::export_memory(device, address);
            return nb::bytes(reinterpret_cast<const char*>(&handle), sizeof(handle));
        },
        "device"_a, "address"_a);
    module.def(
        "hip_open_memory",
        [](int device, const nb::bytes& exported) {
            hip::IpcHandle handle{};
            if (exported.size() != sizeof(handle)) {
                throw std::invalid_argument("a handle of exported memory has " +
                                            std::to_string(sizeof(handle)) + " bytes");
            }
            std::memcpy(&handle, exported.c_str(), sizeof(handle));
            const nb::gil_scoped_release release;
            return hip::open_memory(device, handle);
        },
        "device"_a, "exported"_a);
    module.def("hip_close_memory", &hip::close_memory, "device"_a, "address"_a, WithoutGil());
}

}  // namespace ficco::bind
