// Loads and launches the kernel that stores words.
#include "ficco/cuda_store.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "ficco/cuda.hpp"

namespace ficco::cuda {

namespace {

constexpr char kText[] =
#include "store_words.ptx.inc"
    ;

// The kernel's parameter.
struct StoredWords {
    std::array<Pointer, kMostStored> at;
    std::array<std::uint32_t, kMostStored> value;
    std::uint32_t first;  // number of words that are stored before the others
    std::uint32_t count;
};
static_assert(offsetof(StoredWords, value) == 1024 && offsetof(StoredWords, first) == 1536 &&
              sizeof(StoredWords) == 1544);

}  // namespace

namespace {

Function load(Device device) {
    const Table& table_ = driver();
    if (table_.cuFuncLoad == nullptr) {
        throw GpuError("kernels can be loaded ahead from CUDA 12.4 on; install a newer driver");
    }
    Module module = nullptr;
    Function kernel = nullptr;
    Context kept = nullptr;
    FICCO_CALL(cuModuleLoadData, &module, kText);
    FICCO_CALL(cuModuleGetFunction, &kernel, module, "ficco_store_words");
    FICCO_CALL(cuFuncLoad, kernel);  // now, not later while a stream waits
    FICCO_CALL(cuDevicePrimaryCtxRetain, &kept, device);
    return kernel;
}

}  // namespace

Function load_store_kernel(Device device) {
    struct Loaded {
        Function kernel = nullptr;
        std::string error;
    };
    static std::mutex mutex;
    static auto* const loaded = new std::map<Device, Loaded>;
    const std::lock_guard lock(mutex);
    const auto [entry, first] = loaded->try_emplace(device);
    Loaded& state = entry->second;
    if (first) {
        try {
            state.kernel = load(device);
        } catch (const GpuError& error) {
            state.error = error.what();
        }
    }
    if (state.kernel == nullptr) throw GpuError(state.error);
    return state.kernel;
}

void launch_store_kernel(Function kernel, std::span<const WordCommand> writes, Stream stream) {
    const Table& table_ = driver();
    const auto others = std::ranges::find_if(writes, [](auto& write) { return write.value != 0; });
    StoredWords words;
    words.first = static_cast<std::uint32_t>(others - writes.begin());
    words.count = static_cast<std::uint32_t>(writes.size());
    for (std::size_t i = 0; i < writes.size(); ++i) {
        words.at[i] = writes[i].address;
        words.value[i] = writes[i].value;
    }
    void* parameters[] = {&words};
    FICCO_CALL(cuLaunchKernel, kernel, 1, 1, 1, kMostStored, 1, 1, 0, stream, parameters, nullptr);
}

}  // namespace ficco::cuda
