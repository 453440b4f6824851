// AMD: the HIP library, opened at run time, its devices, and the Gpu implementation for them.
// Nothing here has run on AMD's hardware.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/hip_api.hpp"

namespace ficco::hip {

// The library of the process.
struct Library {
    std::string path;
    int version;  // 70125424: HIP 7.1
    Table table;
};

// The library that the process has loaded already, as PyTorch does; otherwise it is opened at the
// first call. Throws a GpuError that says what is missing; a later call tries again.
const Library& library();

// Throws GpuError if a call of the library has failed, and takes that error out of the thread's
// last error, where other libraries would find it.
void check(Status status, const char* call);

// Drops the failure of a call where nobody can be told; the thread's last error does not keep it.
inline void forget(Status status) noexcept {
    if (status != kSuccess) library().table.hipGetLastError();
}

// Calls a function of the table and checks its status.
template <auto place, class... Given>
void call(Given... given) {
    check((library().table.*place)(given...), name_of<place>());
}

struct Capabilities {
    std::string name;
    std::string arch;        // the code that it runs, such as "gfx942"
    std::array<int, 3> pci;  // domain, bus, device; independent of a process's device numbers
    int compute_units;
    int warp;                  // threads of a wavefront
    std::size_t memory_bytes;  // of the device
    std::size_t shared_bytes;  // that a block may use
    std::vector<bool> peers;   // per device: whether this one can access its memory
};

// Throws GpuError if there is none.
int device_count();
Capabilities capabilities(int device);

// The kernel by which a device waits for words: its code object, and the dynamic shared memory of a
// launch. Without a code object there is none.
struct AwaitCode {
    std::string code;
    unsigned shared_bytes = 0;
};

std::shared_ptr<Gpu> open_gpu(int device, const AwaitCode& await = {});

}  // namespace ficco::hip
