// Loads and launches the kernels that store words and wait for words.
#include "ficco/cuda_words.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "ficco/cuda.hpp"
#include "ficco/limits.hpp"

namespace ficco::cuda {

namespace {

constexpr char kStore[] =
#include "store_words.ptx.inc"
    ;
constexpr char kAwait[] =
#include "await_words.ptx.inc"
    ;

// The parameter of the kernel that stores.
struct StoredWords {
    std::array<Pointer, kMostStored> at;
    std::array<std::uint32_t, kMostStored> value;
    std::uint32_t first;  // number of words that are stored before the others
    std::uint32_t count;
};
static_assert(offsetof(StoredWords, value) == 1024 && offsetof(StoredWords, first) == 1536 &&
              sizeof(StoredWords) == 1544);

// The parameter of the kernel that waits.
struct AwaitedWords {
    std::array<Pointer, kMostStored> at;
    std::array<std::uint32_t, kMostStored> value;
    Pointer stop;
    Pointer lane;
    Pointer missed;
    std::uint64_t limit_ns;
    std::array<Pointer, kWindowCopies> data;
    std::uint64_t data_bytes;
    std::array<std::uint32_t, kMostStored> number;
    std::uint32_t mark;
    std::uint32_t count;
};
static_assert(offsetof(AwaitedWords, stop) == 1536 && offsetof(AwaitedWords, data) == 1568 &&
              offsetof(AwaitedWords, number) == 1592 && offsetof(AwaitedWords, mark) == 2104 &&
              sizeof(AwaitedWords) == 2112);

Function load(const char* text, const char* name) {
    const Table& table_ = driver();
    Module module = nullptr;
    Function kernel = nullptr;
    FICCO_CALL(cuModuleLoadData, &module, text);
    FICCO_CALL(cuModuleGetFunction, &kernel, module, name);
    FICCO_CALL(cuFuncLoad, kernel);  // now, not later while a stream waits
    return kernel;
}

WordKernels load_all(Device device) {
    const Table& table_ = driver();
    if (table_.cuFuncLoad == nullptr) {
        throw GpuError("kernels can be loaded ahead from CUDA 12.4 on; install a newer driver");
    }
    const WordKernels kernels{.store = load(kStore, "ficco_store_words"),
                              .await = load(kAwait, "ficco_await_words")};
    Context kept = nullptr;
    FICCO_CALL(cuDevicePrimaryCtxRetain, &kept, device);
    return kernels;
}

}  // namespace

WordKernels load_word_kernels(Device device) {
    struct Loaded {
        WordKernels kernels;
        std::string error;
    };
    static std::mutex mutex;
    static auto* const loaded = new std::map<Device, Loaded>;
    const std::lock_guard lock(mutex);
    const auto [entry, first] = loaded->try_emplace(device);
    Loaded& state = entry->second;
    if (first) {
        try {
            state.kernels = load_all(device);
        } catch (const GpuError& error) {
            state.error = error.what();
        }
    }
    if (state.kernels.store == nullptr) throw GpuError(state.error);
    return state.kernels;
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

void launch_await_kernel(Function kernel, const KernelWait& wait, Stream stream) {
    const Table& table_ = driver();
    AwaitedWords words{};
    words.stop = wait.stop;
    words.lane = wait.lane;
    words.missed = wait.missed;
    words.limit_ns = wait.limit_ns;
    words.data = {wait.data[0], wait.data[1]};
    words.data_bytes = wait.data_bytes;
    words.mark = wait.mark;
    words.count = static_cast<std::uint32_t>(wait.words.size());
    for (std::size_t i = 0; i < wait.words.size(); ++i) {
        words.at[i] = wait.words[i].address;
        words.value[i] = wait.words[i].value;
        words.number[i] = wait.words[i].number;
    }
    void* parameters[] = {&words};
    FICCO_CALL(cuLaunchKernel, kernel, 1, 1, 1, kMostStored, 1, 1, 0, stream, parameters, nullptr);
}

}  // namespace ficco::cuda
