// Constants are process-wide, like kernels: a table per device, from values to words.
#include "ficco/hip_constants.hpp"

#include <cstddef>
#include <map>
#include <mutex>

#include "ficco/hip.hpp"
#include "ficco/hip_device.hpp"

namespace ficco::hip {

namespace {

constexpr std::size_t kPageWords = 4096;

// The pages are not cached, because copy engines read them from memory.
class Constants {
  public:
    GpuAddress of(std::uint32_t value) {
        const std::lock_guard lock(mutex_);
        const auto entry = words_.find(value);
        if (entry != words_.end()) return entry->second;
        const Uncaptured uncaptured;
        if (stream_ == nullptr) open();
        if (left_ == 0) add_page();
        write(next_, value);
        const auto word = reinterpret_cast<GpuAddress>(next_++);
        words_.emplace(value, word);
        --left_;
        return word;
    }

  private:
    void open() {
        void* written = nullptr;
        call<&Table::hipHostMalloc>(&written, sizeof(std::uint32_t), kHostPortable | kHostMapped);
        written_ = static_cast<std::uint32_t*>(written);
        call<&Table::hipStreamCreateWithPriority>(&stream_, kStreamNonBlocking, 0);
    }

    void add_page() {
        void* page = nullptr;
        call<&Table::hipExtMallocWithFlags>(&page, kPageWords * sizeof(std::uint32_t),
                                            kMemoryUncached);
        next_ = static_cast<std::uint32_t*>(page);
        left_ = kPageWords;
    }

    // Returns when the word has the value, so that any stream can read it.
    void write(std::uint32_t* word, std::uint32_t value) {
        *written_ = value;
        call<&Table::hipMemcpyAsync>(word, written_, sizeof(value), kCopyToDevice, stream_);
        await(stream_);
    }

    std::mutex mutex_;
    std::map<std::uint32_t, GpuAddress> words_;
    Stream stream_ = nullptr;
    std::uint32_t* written_ = nullptr;  // by the host, for the copy
    std::uint32_t* next_ = nullptr;     // of the device
    std::size_t left_ = 0;
};

}  // namespace

GpuAddress constant_word(int device, std::uint32_t value) {
    static std::mutex mutex;
    static auto* const tables = new std::map<int, Constants>;  // never freed, as graphs hold it
    Constants& table = [&]() -> Constants& {
        const std::lock_guard lock(mutex);
        return (*tables)[device];
    }();
    return table.of(value);
}

}  // namespace ficco::hip
