// Loads and launches the kernel that waits for words.
#include "ficco/hip_await.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ficco/hip.hpp"
#include "ficco/hip_code.hpp"

namespace ficco::hip {

namespace {

constexpr char kEntry[] = "ficco_await_words";
constexpr double kNsASecond = 1e9;
constexpr std::uint64_t kMsASecond = 1000;

// The parameters, in the order of the kernel's.
struct Parameters {
    static constexpr std::size_t kWords = AwaitKernel::kWords;
    // at, values, numbers; stop, lane, missed; first, second, size, limit; mark, count; and the
    // addresses of scratch memory that Triton adds, which the kernel does not use
    static constexpr std::size_t kCount = 3 * kWords + 3 + 4 + 2 + 2;

    std::array<std::uint64_t, kWords> at{};
    std::array<std::uint32_t, kWords> values{};
    std::array<std::uint32_t, kWords> numbers{};
    std::uint64_t stop, lane, missed;
    std::uint64_t first, second, size;
    std::uint64_t limit;
    std::uint32_t mark, count;
    std::array<std::uint64_t, 2> scratch{};

    std::vector<void*> addresses() {
        std::vector<void*> found;
        for (auto& each : at) found.push_back(&each);
        for (auto& each : values) found.push_back(&each);
        for (auto& each : numbers) found.push_back(&each);
        for (auto* each : {&stop, &lane, &missed, &first, &second, &size, &limit}) {
            found.push_back(each);
        }
        for (auto* each : {&mark, &count}) found.push_back(each);
        for (auto& each : scratch) found.push_back(&each);
        return found;
    }
    static std::vector<std::size_t> sizes() {
        std::vector<std::size_t> found(kWords, 8);
        found.insert(found.end(), 2 * kWords, 4);
        found.insert(found.end(), 7, 8);
        found.insert(found.end(), 2, 4);
        found.insert(found.end(), 2, 8);
        return found;
    }
};

// Before HIP 7 the library does not know the attribute of the number of L2s. No device of a known
// architecture has more, and more programs than L2s do no harm.
constexpr int kMostL2s = 8;

int number_of_l2s(int device) {
    int value = 0;
    const Status status = library().table.hipDeviceGetAttribute(&value, kNumberOfXccs, device);
    if (status == kInvalidValue) {
        forget(status);
        return kMostL2s;
    }
    check(status, name_of<&Table::hipDeviceGetAttribute>());
    return std::max(value, 1);
}

}  // namespace

std::uint64_t clock_ticks_a_second(int device) {
    int rate = 0;  // in ticks a millisecond
    call<&Table::hipDeviceGetAttribute>(&rate, kWallClockRate, device);
    if (rate <= 0) throw GpuError("HIP does not tell the rate of the device's constant clock");
    return static_cast<std::uint64_t>(rate) * kMsASecond;
}

AwaitKernel::AwaitKernel(int device, std::string_view code, unsigned shared_bytes)
    : kernel_(load_code(code, kEntry)),
      programs_(static_cast<unsigned>(number_of_l2s(device))),
      shared_bytes_(shared_bytes) {
    Properties found{};
    call<&Table::hipGetDevicePropertiesR0600>(&found, device);
    threads_ = static_cast<unsigned>(found.warp);
    ticks_a_ns_ = static_cast<double>(clock_ticks_a_second(device)) / kNsASecond;
    if (parameters_of(kernel_) != Parameters::sizes()) {
        throw GpuError(std::string("the kernel ") + kEntry +
                       " has other parameters than the core passes; build its code again with "
                       "`python -m ficco.cli.packing --amd`");
    }
}

void AwaitKernel::launch(const KernelWait& wait, Stream stream) const {
    for (std::size_t begin = 0; begin < wait.words.size(); begin += kWords) {
        const std::size_t count = std::min(kWords, wait.words.size() - begin);
        launch(wait, wait.words.subspan(begin, count), stream);
    }
}

void AwaitKernel::launch(const KernelWait& wait, std::span<const AwaitedValue> words,
                         Stream stream) const {
    Parameters given{};
    for (std::size_t i = 0; i < kWords; ++i) {
        const AwaitedValue& word = words[std::min(i, words.size() - 1)];
        given.at[i] = word.address;
        given.values[i] = word.value;
        given.numbers[i] = word.number;
    }
    given.stop = wait.stop;
    given.lane = wait.lane;
    given.missed = wait.missed;
    given.first = wait.data[0];
    given.second = wait.data[1];
    given.size = wait.data_bytes;
    given.limit = static_cast<std::uint64_t>(static_cast<double>(wait.limit_ns) * ticks_a_ns_);
    given.mark = wait.mark;
    given.count = static_cast<std::uint32_t>(words.size());
    std::vector<void*> parameters = given.addresses();
    call<&Table::hipModuleLaunchKernel>(kernel_, programs_, 1U, 1U, threads_, 1U, 1U, shared_bytes_,
                                        stream, parameters.data(), static_cast<void**>(nullptr));
}

}  // namespace ficco::hip
