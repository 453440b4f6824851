// The interface: memory, and synchronous and stream-ordered operations on it.
#include "calls.hpp"

using namespace ficco::driver_double;

namespace {

Place device_place(Address address) { return {address, Expect::kKnown}; }

Place host_place(const void* address) { return {reinterpret_cast<Address>(address), Expect::kAny}; }

enum PointerAttribute {
    kContext = 1,
    kMemoryType = 2,
    kDevicePointer = 3,
    kHostPointer = 4,
    kIsManaged = 8,
    kDeviceOrdinal = 9,
    kRangeStart = 11,
    kRangeSize = 12,
};

}  // namespace

DOUBLE_API Status cuMemGetInfo(std::size_t* available, std::size_t* total) {
    return call("cuMemGetInfo", [&](Driver& driver, Lock&) {
        out(available) = driver.memory.available(driver.current()->device);
        out(total) = Memory::total();
    });
}
DOUBLE_ALIAS(cuMemGetInfo_v2, cuMemGetInfo);

DOUBLE_API Status cuMemAlloc(Address* address, std::size_t bytes) {
    return call("cuMemAlloc", [&](Driver& driver, Lock&) {
        out(address) = allocate(driver, Block::Kind::kDevice, bytes);
    });
}
DOUBLE_ALIAS(cuMemAlloc_v2, cuMemAlloc);

DOUBLE_API Status cuMemFree(Address address) {
    return call("cuMemFree",
                [&](Driver& driver, Lock& lock) { free_device(driver, lock, address); });
}
DOUBLE_ALIAS(cuMemFree_v2, cuMemFree);

DOUBLE_API Status cuMemHostAlloc(void** address, std::size_t bytes, unsigned flags) {
    return call("cuMemHostAlloc", [&](Driver& driver, Lock&) {
        if (flags > 7) throw Failure{kInvalidValue};
        const Address begin = allocate(driver, Block::Kind::kHost, bytes);
        out(address) = reinterpret_cast<void*>(begin);
    });
}

DOUBLE_API Status cuMemAllocHost(void** address, std::size_t bytes) {
    return call("cuMemAllocHost", [&](Driver& driver, Lock&) {
        const Address begin = allocate(driver, Block::Kind::kHost, bytes);
        out(address) = reinterpret_cast<void*>(begin);
    });
}
DOUBLE_ALIAS(cuMemAllocHost_v2, cuMemAllocHost);

DOUBLE_API Status cuMemFreeHost(void* address) {
    return call("cuMemFreeHost",
                [&](Driver& driver, Lock&) { free_host(driver, Block::Kind::kHost, address); });
}

DOUBLE_API Status cuMemHostRegister(void* address, std::size_t bytes, unsigned) {
    return call("cuMemHostRegister", [&](Driver& driver, Lock&) {
        const int device = driver.current()->device;
        driver.captures.refuse_unsafe();
        driver.memory.add_registered(device, address, bytes);
    });
}
DOUBLE_ALIAS(cuMemHostRegister_v2, cuMemHostRegister);

DOUBLE_API Status cuMemHostUnregister(void* address) {
    return call("cuMemHostUnregister", [&](Driver& driver, Lock&) {
        const auto block = driver.memory.find(reinterpret_cast<Address>(address));
        if (!block || block->kind != Block::Kind::kRegistered) {
            throw Failure{kHostMemoryNotRegistered};
        }
        free_host(driver, Block::Kind::kRegistered, address);
    });
}

DOUBLE_API Status cuMemHostGetDevicePointer(Address* address, void* host, unsigned flags) {
    return call("cuMemHostGetDevicePointer", [&](Driver& driver, Lock&) {
        driver.current();
        const auto block = driver.memory.find(reinterpret_cast<Address>(host));
        if (flags != 0 || !block || block->kind == Block::Kind::kDevice) {
            throw Failure{kInvalidValue};
        }
        out(address) = reinterpret_cast<Address>(host);
    });
}
DOUBLE_ALIAS(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer);

DOUBLE_API Status cuMemGetAddressRange(Address* begin, std::size_t* bytes, Address address) {
    return call("cuMemGetAddressRange", [&](Driver& driver, Lock&) {
        driver.current();
        const auto block = driver.memory.find(address);
        if (!block) throw Failure{kNotFound};
        if (begin != nullptr) *begin = block->address;
        if (bytes != nullptr) *bytes = block->bytes;
    });
}
DOUBLE_ALIAS(cuMemGetAddressRange_v2, cuMemGetAddressRange);

DOUBLE_API Status cuPointerGetAttribute(void* data, int attribute, Address address) {
    return call("cuPointerGetAttribute", [&](Driver& driver, Lock&) {
        driver.current();
        const auto block = driver.memory.find(address);
        if (data == nullptr || !block) throw Failure{kInvalidValue};
        const bool host = block->kind != Block::Kind::kDevice;
        switch (attribute) {
            case kContext: {
                const auto& context = driver.device(block->device).context;
                *static_cast<ContextHandle*>(data) = context ? context->handle : nullptr;
                return;
            }
            case kMemoryType:
                *static_cast<int*>(data) = host ? kMemoryHost : kMemoryDevice;
                return;
            case kHostPointer:
                if (!host) throw Failure{kInvalidValue};
                [[fallthrough]];
            case kDevicePointer:
                *static_cast<Address*>(data) = address;
                return;
            case kIsManaged:
                *static_cast<int*>(data) = 0;
                return;
            case kDeviceOrdinal:
                *static_cast<int*>(data) = block->device;
                return;
            case kRangeStart:
                *static_cast<Address*>(data) = block->address;
                return;
            case kRangeSize:
                *static_cast<std::size_t*>(data) = block->bytes;
                return;
            default:
                throw Failure{kInvalidValue};
        }
    });
}

DOUBLE_API Status cuMemcpy(Address target, Address source, std::size_t bytes) {
    return call("cuMemcpy", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, copy({target}, {source}, bytes));
    });
}

DOUBLE_API Status cuMemcpyHtoD(Address target, const void* source, std::size_t bytes) {
    return call("cuMemcpyHtoD", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, copy(device_place(target), host_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyHtoD_v2, cuMemcpyHtoD);

DOUBLE_API Status cuMemcpyDtoH(void* target, Address source, std::size_t bytes) {
    return call("cuMemcpyDtoH", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, copy(host_place(target), device_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyDtoH_v2, cuMemcpyDtoH);

DOUBLE_API Status cuMemcpyDtoD(Address target, Address source, std::size_t bytes) {
    return call("cuMemcpyDtoD", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, copy(device_place(target), device_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyDtoD_v2, cuMemcpyDtoD);

DOUBLE_API Status cuMemcpy2D(const Copy2D* rows) {
    return call("cuMemcpy2D",
                [&](Driver& driver, Lock& lock) { run_now(driver, lock, copy_2d(out(rows))); });
}
DOUBLE_ALIAS(cuMemcpy2D_v2, cuMemcpy2D);

DOUBLE_API Status cuMemcpyAsync(Address target, Address source, std::size_t bytes,
                                StreamHandle stream) {
    return call("cuMemcpyAsync", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, copy({target}, {source}, bytes));
    });
}

DOUBLE_API Status cuMemcpyHtoDAsync(Address target, const void* source, std::size_t bytes,
                                    StreamHandle stream) {
    return call("cuMemcpyHtoDAsync", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, copy(device_place(target), host_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync);

DOUBLE_API Status cuMemcpyDtoHAsync(void* target, Address source, std::size_t bytes,
                                    StreamHandle stream) {
    return call("cuMemcpyDtoHAsync", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, copy(host_place(target), device_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync);

DOUBLE_API Status cuMemcpyDtoDAsync(Address target, Address source, std::size_t bytes,
                                    StreamHandle stream) {
    return call("cuMemcpyDtoDAsync", [&](Driver& driver, Lock&) {
        enqueue(driver, stream, copy(device_place(target), device_place(source), bytes));
    });
}
DOUBLE_ALIAS(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync);

DOUBLE_API Status cuMemcpyPeerAsync(Address target, ContextHandle target_context, Address source,
                                    ContextHandle source_context, std::size_t bytes,
                                    StreamHandle stream) {
    return call("cuMemcpyPeerAsync", [&](Driver& driver, Lock&) {
        driver.contexts.find(target_context);
        driver.contexts.find(source_context);
        enqueue(driver, stream,
                copy(device_place(target), device_place(source), bytes, Route::kHost));
    });
}

DOUBLE_API Status cuMemcpy2DAsync(const Copy2D* rows, StreamHandle stream) {
    return call("cuMemcpy2DAsync",
                [&](Driver& driver, Lock&) { enqueue(driver, stream, copy_2d(out(rows))); });
}
DOUBLE_ALIAS(cuMemcpy2DAsync_v2, cuMemcpy2DAsync);

DOUBLE_API Status cuMemsetD8(Address target, unsigned char value, std::size_t count) {
    return call("cuMemsetD8", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, fill(*driver.current(), target, value, 1, count));
    });
}
DOUBLE_ALIAS(cuMemsetD8_v2, cuMemsetD8);

DOUBLE_API Status cuMemsetD16(Address target, unsigned short value, std::size_t count) {
    return call("cuMemsetD16", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, fill(*driver.current(), target, value, 2, count));
    });
}
DOUBLE_ALIAS(cuMemsetD16_v2, cuMemsetD16);

DOUBLE_API Status cuMemsetD32(Address target, unsigned value, std::size_t count) {
    return call("cuMemsetD32", [&](Driver& driver, Lock& lock) {
        run_now(driver, lock, fill(*driver.current(), target, value, 4, count));
    });
}
DOUBLE_ALIAS(cuMemsetD32_v2, cuMemsetD32);

DOUBLE_API Status cuMemsetD8Async(Address target, unsigned char value, std::size_t count,
                                  StreamHandle stream) {
    return call("cuMemsetD8Async", [&](Driver& driver, Lock&) {
        enqueue_fill(driver, stream, target, value, 1, count);
    });
}

DOUBLE_API Status cuMemsetD16Async(Address target, unsigned short value, std::size_t count,
                                   StreamHandle stream) {
    return call("cuMemsetD16Async", [&](Driver& driver, Lock&) {
        enqueue_fill(driver, stream, target, value, 2, count);
    });
}

DOUBLE_API Status cuMemsetD32Async(Address target, unsigned value, std::size_t count,
                                   StreamHandle stream) {
    return call("cuMemsetD32Async", [&](Driver& driver, Lock&) {
        enqueue_fill(driver, stream, target, value, 4, count);
    });
}
