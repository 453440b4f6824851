// The functions by which tests make kernels, and disturb streams.
#include "call.hpp"
#include "kernels.hpp"
#include "work.hpp"

using namespace ficco::driver_double;

// Returns the handle of a kernel with parameters of so many bytes, which `run` stands for; null
// where that cannot be.
DOUBLE_API FunctionHandle ficcoDoubleKernel(const std::size_t* bytes, int count, HostKernel run) {
    FunctionHandle handle = nullptr;
    call("ficcoDoubleKernel", [&](Driver&, Lock&) {
        handle = Kernels::get().add({&out(bytes), static_cast<std::size_t>(count)}, run);
    });
    return handle;
}

// Replaces a kernel of a cubin by a host function.
DOUBLE_API Status ficcoDoubleStandIn(FunctionHandle function, HostKernel run) {
    return call("ficcoDoubleStandIn",
                [&](Driver&, Lock&) { Kernels::get().stand_in(function, run); });
}

// Makes the context of the stream fail with the status when the stream has done what was enqueued
// before, as a kernel may that touches what it must not.
DOUBLE_API Status ficcoDoubleFailStream(StreamHandle stream, Status status) {
    return call("ficcoDoubleFailStream", [&](Driver& driver, Lock&) {
        driver.submit(*driver.stream(stream), fail(status));
    });
}

// Makes the stream idle for that long after its earlier work.
DOUBLE_API Status ficcoDoubleStallStream(StreamHandle stream, double seconds) {
    return call("ficcoDoubleStallStream", [&](Driver& driver, Lock&) {
        driver.submit(*driver.stream(stream), sleep(seconds));
    });
}
