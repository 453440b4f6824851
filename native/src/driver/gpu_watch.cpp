// The watch's thread: looking at lanes, telling the group, and letting streams go.
#include "ficco/gpu_watch.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/op.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kLookNs = 20'000'000;
constexpr std::int64_t kReleaseNs = 2'000'000;  // between looks once the group has failed
constexpr double kDeviceAnswersS = 2.0;
constexpr int kPauses = 100;  // looks to let pass after the device did not do what was asked
constexpr std::size_t kRemembered = 256;  // plans whose last calls may still be enqueued
constexpr std::uint32_t kMark = 1U << 31;
constexpr std::size_t kLaneWords = kMaxLanes + 1;
constexpr std::size_t kPageWords = kLaneWords + 1;  // the told word is the last of them
constexpr std::size_t kStagingBytes = kWordsPerCopy * sizeof(std::uint32_t);
constexpr unsigned char kNanByte = 0xFF;  // float32, float16 and bfloat16 of these bytes are NaN

}  // namespace

GpuWatch::GpuWatch(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank)
    : gpu_(std::move(gpu)), group_(std::move(group)), rank_(rank), seen_(kLaneWords) {
    const Gpu::Current current(*gpu_);
    page_ = gpu_->new_host_page(kPageWords * sizeof(std::uint32_t) + kStagingBytes);
    auto* words = static_cast<std::uint32_t*>(page_.host);
    std::fill_n(words, kPageWords, 0U);
    staging_ = words + kPageWords;
    stream_ = gpu_->new_stream(true);
    thread_ =
        std::make_unique<Thread>("ficco r" + std::to_string(rank) + " watch", [this] { loop(); });
}

GpuWatch::~GpuWatch() {
    stop_.store(1, std::memory_order_release);
    futex_wake_all(stop_);
    thread_->join();
    try {
        const Gpu::Current current(*gpu_);
        gpu_->delete_stream(stream_);
        gpu_->delete_host_page(page_);
    } catch (const GpuError&) {
        // the device is lost, and with it what it held
    }
}

int GpuWatch::add(WatchedCalls calls) {
    const std::lock_guard lock(mutex_);
    calls_.emplace(next_, std::move(calls));
    return next_++;
}

void GpuWatch::remove(int number) {
    const std::lock_guard lock(mutex_);
    removed_.push_back(number);
    if (removed_.size() <= kRemembered) return;
    calls_.erase(removed_.front());
    removed_.pop_front();
}

GpuAddress GpuWatch::lane_word(int lane) const noexcept {
    return page_.device + sizeof(std::uint32_t) * static_cast<GpuAddress>(lane + 1);
}

void GpuWatch::set_stop_word(GpuAddress word) {
    const std::lock_guard lock(mutex_);
    stop_word_ = word;
}

GpuAddress GpuWatch::told_word() const noexcept {
    return page_.device + sizeof(std::uint32_t) * kLaneWords;
}

std::uint32_t GpuWatch::told() const noexcept {
    return word(kMaxLanes).load(std::memory_order_acquire);
}

std::atomic_ref<std::uint32_t> GpuWatch::word(int lane) const noexcept {
    return std::atomic_ref(static_cast<std::uint32_t*>(page_.host)[lane + 1]);
}

std::optional<WatchedCalls> GpuWatch::find(std::uint32_t value) {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(static_cast<int>(value / kWindowCopies));
    if (found == calls_.end()) return std::nullopt;
    return found->second;
}

void GpuWatch::loop() noexcept {
    while (stop_.load(std::memory_order_acquire) == 0) {
        const bool failed = group_->failed();
        try {
            if (failed) {
                if (stuck_ && ++pauses_ % kPauses == 0) stuck_ = false;  // it may do by now
                if (!stuck_) let_go();
            } else {
                stuck_ = false;
                look();
                look_at_told();
            }
        } catch (const GpuError&) {
            stuck_ = true;  // whoever calls next is told by the driver, too
            group_->fail({rank_, -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0});
        }
        futex_wait(stop_, 0, now_ns() + (failed ? kReleaseNs : kLookNs));
    }
}

// The device's stores and this exchange are atomic to each other: a mark is set only on what the
// device wrote last, and any later store of the device removes it.
void GpuWatch::look() {
    for (int lane = kInline; lane < kMaxLanes; ++lane) {
        Seen& seen = seen_[static_cast<std::size_t>(lane + 1)];
        std::uint32_t value = word(lane).load(std::memory_order_acquire);
        if (value == 0) {
            seen = {};
        } else if ((value & kMark) == 0) {
            if (word(lane).compare_exchange_strong(value, value | kMark)) seen = {value, now_ns()};
        } else if (seen.value != 0) {
            const double seconds = static_cast<double>(now_ns() - seen.since_ns) * 1e-9;
            if (seconds > group_->timeout_s()) {
                tell(lane, seen.value, seconds);
                return;
            }
        }
    }
}

bool GpuWatch::finished_within(double seconds) {
    const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
    while (!gpu_->idle(stream_)) {
        if (now_ns() > deadline || stop_.load(std::memory_order_acquire) != 0) return false;
        sleep_until_ns(now_ns() + kReleaseNs / 10);
    }
    return true;
}

// A kernel has given a word up. Of which of its plans the word is, is not known: the last one's.
void GpuWatch::look_at_told() {
    if (told() == 0) return;
    const int index = static_cast<int>(told() - 1);
    Failure failure{rank_, 0, rank_, index, Failure::Kind::timeout, group_->timeout_s(), 0, 1U};
    std::shared_ptr<const GpuWindow> window;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [number, calls] : calls_) {
            for (const AwaitedWord& awaited : calls.awaited) {
                if (awaited.lane != AwaitedWord::kTold || awaited.index != index) continue;
                failure.step = awaited.step;
                failure.expected = awaited.value;
                window = calls.window;
            }
        }
    }
    if (window) {
        const Gpu::Current current(*gpu_);
        for (const int copy : {0, 1}) {
            gpu_->read(staging_, window->words(rank_, copy), kStagingBytes, stream_);
            stuck_ = !finished_within(kDeviceAnswersS);
            if (stuck_) break;
            const std::uint32_t found = staging_[index];
            if (found != 0 && found != failure.expected) failure.found = found;
        }
    }
    group_->fail(failure);
}

// Finds the first word that a lane misses, and fails the group with it.
void GpuWatch::tell(int lane, std::uint32_t value, double seconds) {
    Failure failure{rank_, -1, -1, -1, Failure::Kind::timeout, seconds, 0, 0};
    const auto calls = find(value);
    if (calls) {
        const Gpu::Current current(*gpu_);
        const int copy = static_cast<int>(value % kWindowCopies);
        std::array<bool, kWindowCopies> read{};
        for (const int other : {0, 1}) {
            const auto first = std::find_if(
                calls->awaited.begin(), calls->awaited.end(), [&](const AwaitedWord& awaited) {
                    return awaited.lane == lane && awaited.other_copy == other;
                });
            if (first == calls->awaited.end()) continue;
            gpu_->read(staging_, calls->window->words(rank_, copy ^ other), kStagingBytes, stream_);
            stuck_ = !finished_within(kDeviceAnswersS);
            if (stuck_) break;
            read[static_cast<std::size_t>(other)] = true;
            for (const AwaitedWord& awaited : calls->awaited) {
                if (awaited.lane != lane || awaited.other_copy != other) continue;
                const std::uint32_t found = staging_[awaited.index];
                if (found == awaited.value) continue;
                failure = {rank_,         awaited.step,           rank_,
                           awaited.index, Failure::Kind::timeout, seconds,
                           found,         awaited.value};
                break;
            }
            if (failure.step >= 0) break;
        }
        if (failure.step < 0 && !calls->awaited.empty()) {
            failure.step = calls->awaited.front().step;
        }
    }
    group_->fail(failure);
}

// Once the group has failed, whatever waits on this device is let go, with NaN in its window.
void GpuWatch::let_go() {
    const Gpu::Current current(*gpu_);
    {
        const std::lock_guard lock(mutex_);  // until it is written, for the word may go then
        if (stop_word_ != 0) {
            const std::array command{WordCommand{WordCommand::Kind::write, stop_word_, 1U}};
            gpu_->words(command, stream_);
            stuck_ = !finished_within(kDeviceAnswersS);
        }
    }
    if (stuck_) return;
    for (int lane = kInline; lane < kMaxLanes; ++lane) {
        const std::uint32_t value = word(lane).load(std::memory_order_acquire) & ~kMark;
        if (value != 0) release(value, lane);
        if (stuck_) return;
    }
}

void GpuWatch::release(std::uint32_t value, int lane) {
    const auto calls = find(value);
    if (!calls) return;
    const int copy = static_cast<int>(value % kWindowCopies);
    for (const int each : {0, 1}) {
        gpu_->fill(calls->window->data(rank_, each), kNanByte, calls->window->data_bytes(),
                   stream_);
    }
    std::vector<WordCommand> commands;
    for (const AwaitedWord& awaited : calls->awaited) {
        if (awaited.lane == lane) {
            commands.push_back(
                {WordCommand::Kind::write,
                 calls->window->word(rank_, copy ^ awaited.other_copy, awaited.index),
                 awaited.value});
        }
    }
    gpu_->words(commands, stream_);
    stuck_ = !finished_within(kDeviceAnswersS);
}

}  // namespace ficco
