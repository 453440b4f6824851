// Loading compiled kernels from memory.
#include "ficco/cuda_code.hpp"

#include "ficco/cuda.hpp"

namespace ficco::cuda {

namespace {

constexpr std::string_view kElf = "\177ELF";
constexpr std::string_view kPtx = ".version ";
constexpr unsigned kSharedWithoutAsking = 48U << 10;  // bytes; more needs an attribute

}  // namespace

Function load_code(Device device, std::string_view code, const std::string& entry,
                   unsigned shared_bytes) {
    const Table& table_ = driver();
    if (!code.starts_with(kElf) && !code.starts_with(kPtx)) {
        throw GpuError("the code of the kernel " + entry +
                       " is no cubin and no PTX: it begins neither as ELF nor with .version");
    }
    if (table_.cuFuncLoad == nullptr) {
        throw GpuError("kernels can be loaded ahead from CUDA 12.4 on, and the driver serves " +
                       std::to_string(table_.driver_version / 1000) + "." +
                       std::to_string(table_.driver_version % 1000 / 10) +
                       "; install a newer driver");
    }
    Module module = nullptr;
    Function kernel = nullptr;
    Context kept = nullptr;
    FICCO_CALL(cuModuleLoadData, &module, code.data());
    FICCO_CALL(cuModuleGetFunction, &kernel, module, entry.c_str());
    if (shared_bytes > kSharedWithoutAsking) {
        FICCO_CALL(cuFuncSetAttribute, kernel, kMostSharedBytes, static_cast<int>(shared_bytes));
    }
    FICCO_CALL(cuFuncLoad, kernel);  // now, not later while a stream waits
    FICCO_CALL(cuDevicePrimaryCtxRetain, &kept, device);
    return kernel;
}

}  // namespace ficco::cuda
