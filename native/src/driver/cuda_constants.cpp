// Constants are process-wide, like kernels: a table per device, from values to words.
#include "ficco/cuda_constants.hpp"

#include <cstddef>
#include <map>
#include <mutex>

#include "ficco/clock.hpp"
#include "ficco/cuda.hpp"

namespace ficco::cuda {

namespace {

constexpr std::size_t kPageWords = 4096;
constexpr std::int64_t kConstantLookNs = 20'000;

// Allows this thread to allocate and wait while another stream is captured, without being captured.
class Uncaptured {
  public:
    explicit Uncaptured(const Table& table) : table_(table) {
        FICCO_CALL(cuThreadExchangeStreamCaptureMode, &mode_);
    }
    ~Uncaptured() { table_.cuThreadExchangeStreamCaptureMode(&mode_); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

  private:
    const Table& table_;
    int mode_ = kCaptureModeRelaxed;
};

class Constants {
  public:
    explicit Constants(Device device) : device_(device) {}

    Pointer of(std::uint32_t value) {
        const std::lock_guard lock(mutex_);
        const auto entry = words_.find(value);
        if (entry != words_.end()) return entry->second;
        const Uncaptured uncaptured(table_);
        if (stream_ == nullptr) open();
        if (left_ == 0) add_page();
        write(next_, value);
        words_.emplace(value, next_);
        --left_;
        const Pointer word = next_;
        next_ += sizeof(std::uint32_t);
        return word;
    }

  private:
    void open() {
        Context kept = nullptr;
        FICCO_CALL(cuDevicePrimaryCtxRetain, &kept, device_);  // while its memory is in use
        FICCO_CALL(cuStreamCreateWithPriority, &stream_, kStreamNonBlocking, 0);
    }

    void add_page() {
        FICCO_CALL(cuMemAlloc, &next_, kPageWords * sizeof(std::uint32_t));
        left_ = kPageWords;
    }

    // Returns when the word has the value, so that any stream can read it.
    void write(Pointer word, std::uint32_t value) {
        MemOp write{.word = {kOpWriteValue32, 0, word, value, 0, 0, 0}};
        FICCO_CALL(cuStreamBatchMemOp, stream_, 1, &write, 0);
        for (;;) {
            const Status status = table_.cuStreamQuery(stream_);
            if (status != kNotReady) {
                check(status, "cuStreamQuery");
                return;
            }
            sleep_until_ns(now_ns() + kConstantLookNs);
        }
    }

    const Table& table_ = driver();
    const Device device_;
    std::mutex mutex_;
    std::map<std::uint32_t, Pointer> words_;
    Stream stream_ = nullptr;
    Pointer next_ = 0;
    std::size_t left_ = 0;
};

}  // namespace

Pointer constant_word(Device device, std::uint32_t value) {
    static std::mutex mutex;
    static auto* const tables = new std::map<Device, Constants>;  // never freed, as graphs hold it
    Constants& table = [&]() -> Constants& {
        const std::lock_guard lock(mutex);
        return tables->try_emplace(device, device).first->second;
    }();
    return table.of(value);
}

}  // namespace ficco::cuda
