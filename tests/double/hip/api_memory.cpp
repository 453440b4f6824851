// The interface: memory, also of other processes, copies and fills.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "hip_call.hpp"
#include "modes.hpp"

using namespace ficco::driver_double;

namespace {

constexpr unsigned kFineGrained = 1;
constexpr unsigned kSignal = 2;
constexpr unsigned kUncached = 3;
constexpr unsigned kContiguous = 4;
constexpr unsigned kHostFlags = 0xF0000007;
constexpr unsigned kEnablePeerAccess = 1;

struct IpcHandle {
    char bytes[64];
};

// What a handle says.
struct Exported {
    std::uint64_t bytes;  // of the whole memory; 0 in no handle
    std::uint64_t offset;
    int process, file, device, cached;
};
static_assert(sizeof(Exported) <= sizeof(IpcHandle));

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

void allocate_device(Driver& driver, void** memory, std::size_t bytes, bool cached) {
    void*& place = out(memory);
    place = nullptr;
    if (bytes == 0) return;  // as HIP
    const Sharing sharing{.exported = true, .cached = cached};
    place = reinterpret_cast<void*>(allocate(driver, Block::Kind::kDevice, bytes, sharing));
}

void open_memory(Driver& driver, void** memory, const IpcHandle& handle) {
    Exported found{};
    std::memcpy(&found, handle.bytes, sizeof(found));
    if (found.bytes == 0) throw Failure{kInvalidValue};
    if (found.process == getpid()) throw Failure{kInvalidContext};
    const std::string path =
        "/proc/" + std::to_string(found.process) + "/fd/" + std::to_string(found.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) throw Failure{kInvalidValue};
    const auto context = driver.current();
    driver.device(found.device);
    const Address begin = driver.memory.open(found.device, file, found.bytes, found.cached != 0);
    if (found.device != context->device) context->allow_peer(found.device, true);
    out(memory) = reinterpret_cast<void*>(begin + found.offset);
}

}  // namespace

DOUBLE_API Status hipMemGetInfo(std::size_t* available, std::size_t* total) {
    return hip_call("hipMemGetInfo", [&](Driver& driver, Lock&) {
        out(available) = driver.memory.available(driver.current()->device);
        out(total) = Memory::total();
    });
}

DOUBLE_API Status hipMalloc(void** memory, std::size_t bytes) {
    return hip_call("hipMalloc",
                    [&](Driver& driver, Lock&) { allocate_device(driver, memory, bytes, true); });
}

DOUBLE_API Status hipExtMallocWithFlags(void** memory, std::size_t bytes, unsigned flags) {
    return hip_call("hipExtMallocWithFlags", [&](Driver& driver, Lock&) {
        if (flags > kContiguous || (flags == kSignal && bytes != 8)) throw Failure{kInvalidValue};
        allocate_device(driver, memory, bytes, flags <= kFineGrained);
    });
}

DOUBLE_API Status hipFree(void* memory) {
    return hip_call("hipFree", [&](Driver& driver, Lock& lock) {
        free_device(driver, lock, address_of(memory));
    });
}

DOUBLE_API Status hipHostMalloc(void** memory, std::size_t bytes, unsigned flags) {
    return hip_call("hipHostMalloc", [&](Driver& driver, Lock&) {
        if ((flags & ~kHostFlags) != 0) throw Failure{kInvalidValue};
        out(memory) = reinterpret_cast<void*>(allocate(driver, Block::Kind::kHost, bytes));
    });
}

DOUBLE_API Status hipHostFree(void* memory) {
    return hip_call("hipHostFree",
                    [&](Driver& driver, Lock&) { free_host(driver, Block::Kind::kHost, memory); });
}

DOUBLE_API Status hipHostRegister(void* address, std::size_t bytes, unsigned) {
    return hip_call("hipHostRegister", [&](Driver& driver, Lock&) {
        driver.captures.refuse_unsafe();
        driver.memory.add_registered(driver.current()->device, address, bytes);
    });
}

DOUBLE_API Status hipHostUnregister(void* address) {
    return hip_call("hipHostUnregister", [&](Driver& driver, Lock&) {
        const auto block = driver.memory.find(address_of(address));
        if (!block || block->kind != Block::Kind::kRegistered) {
            throw Failure{kHostMemoryNotRegistered};
        }
        free_host(driver, Block::Kind::kRegistered, address);
    });
}

DOUBLE_API Status hipHostGetDevicePointer(void** device, void* host, unsigned flags) {
    return hip_call("hipHostGetDevicePointer", [&](Driver& driver, Lock&) {
        const auto block = driver.memory.find(address_of(host));
        if (flags != 0 || !block || block->on_device()) throw Failure{kInvalidValue};
        out(device) = host;
    });
}

DOUBLE_API Status hipMemGetAddressRange(void** begin, std::size_t* bytes, void* address) {
    return hip_call("hipMemGetAddressRange", [&](Driver& driver, Lock&) {
        const auto block = driver.memory.find(address_of(address));
        if (!block) throw Failure{kNotFound};
        if (begin != nullptr) *begin = reinterpret_cast<void*>(block->address);
        if (bytes != nullptr) *bytes = block->bytes;
    });
}

DOUBLE_API Status hipIpcGetMemHandle(IpcHandle* handle, void* memory) {
    return hip_call("hipIpcGetMemHandle", [&](Driver& driver, Lock&) {
        const auto block = driver.memory.find(address_of(memory));
        if (!block || block->kind != Block::Kind::kDevice) throw Failure{kInvalidValue};
        const Exported exported{block->bytes,  address_of(memory) - block->address,
                                getpid(),      block->file,
                                block->device, block->cached ? 1 : 0};
        out(handle) = {};
        std::memcpy(handle->bytes, &exported, sizeof(exported));
    });
}

DOUBLE_API Status hipIpcOpenMemHandle(void** memory, IpcHandle handle, unsigned flags) {
    return hip_call("hipIpcOpenMemHandle", [&](Driver& driver, Lock&) {
        if (flags != kEnablePeerAccess) throw Failure{kInvalidValue};
        open_memory(driver, memory, handle);
    });
}

DOUBLE_API Status hipIpcCloseMemHandle(void* memory) {
    return hip_call("hipIpcCloseMemHandle", [&](Driver& driver, Lock& lock) {
        const auto block = driver.memory.find(address_of(memory));
        if (!block || block->kind != Block::Kind::kOpened) throw Failure{kInvalidValue};
        synchronize(driver, lock, driver.current());
        driver.memory.release(Block::Kind::kOpened, block->address);
    });
}

DOUBLE_API Status hipMemcpy(void* target, const void* source, std::size_t bytes, int kind) {
    return hip_call("hipMemcpy", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, copy_of_kind(driver, target, source, bytes, kind));
    });
}

DOUBLE_API Status hipMemcpyAsync(void* target, const void* source, std::size_t bytes, int kind,
                                 StreamHandle stream) {
    return hip_call_on(stream, "hipMemcpyAsync", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, copy_of_kind(driver, target, source, bytes, kind));
    });
}

DOUBLE_API Status hipMemset(void* target, int value, std::size_t bytes) {
    return hip_call("hipMemset", [&](Driver& driver, Lock& lock) {
        const auto byte = static_cast<unsigned char>(value);
        run_now(driver, lock,
                by_kernel(fill(*driver.current(), address_of(target), byte, 1, bytes)));
    });
}

DOUBLE_API Status hipMemsetAsync(void* target, int value, std::size_t bytes, StreamHandle stream) {
    return hip_call_on(stream, "hipMemsetAsync", [&](Driver& driver, Lock&) {
        const auto byte = static_cast<unsigned char>(value);
        const auto context = driver.stream(stream)->context;
        enqueue(driver, stream, by_kernel(fill(*context, address_of(target), byte, 1, bytes)));
    });
}
