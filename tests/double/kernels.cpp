// The kernels of all modules, and of tests.
#include "kernels.hpp"

#include <algorithm>
#include <utility>

#include "objects.hpp"

namespace ficco::driver_double {

Kernels& Kernels::get() {
    static Kernels& kernels = *new Kernels;
    return kernels;
}

FunctionHandle Kernels::add(std::span<const std::size_t> bytes, HostKernel run) {
    for (const std::size_t size : bytes) {
        if (size == 0 || size > sizeof(TensorMap)) throw Failure{kInvalidValue};
    }
    return add(bytes, Kernel{{}, run, nullptr});
}

FunctionHandle Kernels::add(Known known, std::span<const std::size_t> bytes,
                            ContextHandle context) {
    return add(bytes, Kernel{{}, nullptr, context, known});
}

std::vector<Kernel::Parameter> Kernels::layout(std::span<const std::size_t> bytes) {
    std::vector<Kernel::Parameter> parameters;
    std::size_t end = 0;
    for (const std::size_t size : bytes) {
        const std::size_t align = std::min(size, alignof(TensorMap));
        end = (end + align - 1) / align * align;
        parameters.push_back({end, size});
        end += size;
    }
    return parameters;
}

FunctionHandle Kernels::add(std::span<const std::size_t> bytes, Kernel kernel) {
    kernel.parameters = layout(bytes);
    return add(std::move(kernel));
}

FunctionHandle Kernels::add_code(ContextHandle context, std::vector<Kernel::Parameter> parameters) {
    return add(Kernel{
        .parameters = std::move(parameters), .run = nullptr, .context = context, .code = true});
}

FunctionHandle Kernels::add(Kernel kernel) {
    const std::lock_guard lock(mutex_);
    const FunctionHandle handle = new_handle();
    kernels_[handle] = std::make_shared<Kernel>(std::move(kernel));
    return handle;
}

std::shared_ptr<Kernel> Kernels::own(FunctionHandle handle) {
    const auto found = kernels_.find(handle);
    if (found == kernels_.end()) throw Failure{kInvalidHandle};
    return found->second;
}

std::shared_ptr<const Kernel> Kernels::find(FunctionHandle handle) {
    const std::lock_guard lock(mutex_);
    return own(handle);
}

void Kernels::describe(FunctionHandle handle, std::span<const std::size_t> bytes) {
    const std::lock_guard lock(mutex_);
    own(handle)->parameters = layout(bytes);
}

void Kernels::stand_in(FunctionHandle handle, HostKernel run) {
    const std::lock_guard lock(mutex_);
    own(handle)->run = run;
}

void Kernels::allow_shared(FunctionHandle handle, unsigned bytes) {
    const std::lock_guard lock(mutex_);
    own(handle)->most_shared_bytes = bytes;
}

}  // namespace ficco::driver_double
