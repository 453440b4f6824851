// The watchdog's thread: it polls lanes, fails the group, and releases streams.
#include "ficco/gpu_watch.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <span>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/op.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kLookNs = 20'000'000;
constexpr double kPreparationTimeouts = 10;     // for which a wait is suspended at most
constexpr double kCausesFirstS = 0.06;          // three polls
constexpr std::int64_t kReleaseNs = 2'000'000;  // between polls after the group has failed
constexpr double kReadEnds = 5;  // time limit of an abandoned read, in time limits of a response
constexpr std::int64_t kReadLookNs = 1'000'000;
constexpr int kPauses = 100;  // polls to skip after the device did not complete a request
constexpr std::size_t kRemembered = 4096;  // removed plans whose calls may still be enqueued
constexpr std::uint32_t kMark = 1U << 31;
constexpr std::size_t kLaneWords = kMaxLanes + 1;
constexpr std::size_t kMissedPlace = kLaneWords;  // in the page
constexpr std::size_t kProbePlace = kMissedPlace + 1;
constexpr std::size_t kStopPlace = kProbePlace + 1;
constexpr std::size_t kPageWords = kStopPlace + 1;
constexpr std::size_t kStagingBytes = kWordsPerCopy * sizeof(std::uint32_t);
constexpr unsigned char kNanByte = 0xFF;  // float32, float16 and bfloat16 of these bytes are NaN

}  // namespace

GpuWatch::GpuWatch(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank,
                   double answers_within_s)
    : gpu_(std::move(gpu)),
      group_(std::move(group)),
      rank_(rank),
      answers_within_s_(answers_within_s),
      seen_(kLaneWords),
      reader_(gpu_, kStagingBytes) {
    const Gpu::Current current(*gpu_);
    page_ = gpu_->new_host_page(kPageWords * sizeof(std::uint32_t));
    std::fill_n(static_cast<std::uint32_t*>(page_.host), kPageWords, 0U);
    if (gpu_->facts().words) {
        ways_ = std::make_unique<GpuSideChannel>(
            gpu_, page_.device + sizeof(std::uint32_t) * kProbePlace, answers_within_s_, stop_);
    }
    thread_ =
        std::make_unique<Thread>("ficco r" + std::to_string(rank) + " watch", [this] { loop(); });
}

GpuWatch::~GpuWatch() {
    stop_.store(1, std::memory_order_release);
    futex_wake_all(stop_);
    thread_->join();
    ways_.reset();
    // Waiting streams, and streams after a blocked read, write to the page when they continue; and
    // a free may block like a read. The reader's thread owns all that it needs.
    if (waits() || reader_.stands()) return;
    try {
        const Gpu::Current current(*gpu_);
        gpu_->delete_host_page(page_);
    } catch (const GpuError&) {
        // the device and its memory are lost
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

void GpuWatch::forget(const GpuWindow& window) {
    const std::int64_t deadline =
        now_ns() + static_cast<std::int64_t>(kReadEnds * answers_within_s_ * 1e9);
    std::unique_lock asking(asking_);
    while (reader_.stands()) {
        asking.unlock();  // the watchdog may still have to release the wait that blocks the read
        if (now_ns() > deadline) {
            throw GpuError("rank " + std::to_string(rank_) +
                           ": a read of its window's words still stands in the driver, though all "
                           "calls should have ended; the window is not freed: end the process and "
                           "start anew");
        }
        sleep_until_ns(now_ns() + kReadLookNs);
        asking.lock();
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(calls_, [&](const auto& entry) { return entry.second.window.get() == &window; });
}

GpuAddress GpuWatch::lane_word(int lane) const noexcept {
    return page_.device + sizeof(std::uint32_t) * static_cast<GpuAddress>(lane + 1);
}

void GpuWatch::set_stop_word(GpuAddress word) {
    const std::lock_guard asking(asking_);  // the old word may be freed afterwards
    stop_word_.store(word, std::memory_order_release);
}

GpuAddress GpuWatch::stop_word() const noexcept {
    if (!ways_) return page_.device + sizeof(std::uint32_t) * kStopPlace;
    return stop_word_.load(std::memory_order_acquire);
}

GpuAddress GpuWatch::missed_word() const noexcept {
    return page_.device + sizeof(std::uint32_t) * kMissedPlace;
}

std::uint32_t GpuWatch::missed() const noexcept {
    return word(kMaxLanes).load(std::memory_order_acquire);
}

std::atomic_ref<std::uint32_t> GpuWatch::word(int lane) const noexcept {
    return std::atomic_ref(static_cast<std::uint32_t*>(page_.host)[lane + 1]);
}

std::optional<WatchedCalls> GpuWatch::find(std::uint32_t value) {
    const std::lock_guard lock(mutex_);
    const auto entry = calls_.find(static_cast<int>(value / kWindowCopies));
    if (entry == calls_.end()) return std::nullopt;
    return entry->second;
}

void GpuWatch::loop() noexcept {
    while (stop_.load(std::memory_order_acquire) == 0) {
        const bool failed = group_->failed();
        try {
            const std::lock_guard asking(asking_);
            if (failed) {
                if (stuck_ && ++pauses_ % kPauses == 0) stuck_ = false;  // try again
                if (!stuck_) {
                    let_go();
                    if (stuck_ && waits()) say_stuck();
                }
            } else {
                stuck_ = said_ = false;
                stopped_ = 0;
                ways_ ? look() : look_at_kernels();
                look_at_told();
            }
        } catch (const GpuError&) {
            stuck_ = true;  // the driver reports the error to the next caller, too
            group_->fail({rank_, -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0});
        }
        futex_wait(stop_, 0, now_ns() + (failed ? kReleaseNs : kLookNs));
    }
}

// Seconds since a poll first found that the lane's current call waits; negative if none waits. The
// device's stores and this exchange are mutually atomic: a mark is set only on the device's last
// value, and any later store of the device removes it.
double GpuWatch::waited_s(int lane) {
    Seen& seen = seen_[static_cast<std::size_t>(lane + 1)];
    std::uint32_t value = word(lane).load(std::memory_order_acquire);
    if (value == 0) {
        seen = {};
    } else if ((value & kMark) == 0) {
        if (word(lane).compare_exchange_strong(value, value | kMark)) {
            seen = {value, now_ns(), now_ns()};
            if (lane == kInline) last_waiting_ = value;
        }
    } else if (seen.value != 0) {
        return static_cast<double>(now_ns() - seen.since_ns) * 1e-9;
    }
    return -1;
}

// The preparation of a call may take longer than the timeout of a wait. A rank that is stopped
// meanwhile must not suspend the timeout for ever.
void GpuWatch::leave_out_preparation() {
    if (!group_->someone_prepares()) return;
    const double most_s = kPreparationTimeouts * group_->timeout_s();
    const std::int64_t now = now_ns();
    for (Seen& seen : seen_) {
        if (static_cast<double>(now - seen.marked_ns) * 1e-9 < most_s) seen.since_ns = now;
    }
}

void GpuWatch::look() {
    leave_out_preparation();
    const double timeout_s = group_->timeout_s();
    const double patience_s = group_->someone_left() ? std::min(timeout_s, kLeftGraceS) : timeout_s;
    for (int lane = kInline; lane < kMaxLanes; ++lane) {
        const double seconds = waited_s(lane);
        const std::uint32_t value = seen_[static_cast<std::size_t>(lane + 1)].value;
        if (seconds > timeout_s) {
            if (tell(lane, value, seconds)) return;
        } else if (seconds > patience_s && waits_for_who_left(lane, value, seconds)) {
            return;
        }
    }
}

// The same where kernels wait by themselves: one that waits too long is stopped, and then tells
// which word is missing. If it does not, the group fails without that information. Which words have
// arrived is not known here, so a rank that has left is not looked for.
void GpuWatch::look_at_kernels() {
    leave_out_preparation();
    const double timeout_s = group_->timeout_s();
    bool stops = false;
    for (int lane = kInline; lane < kMaxLanes; ++lane) {
        const double seconds = waited_s(lane);
        stops = stops || seconds > timeout_s;
        if (seconds <= timeout_s + answers_within_s_) continue;
        Failure failure{rank_, -1, -1, -1, Failure::Kind::timeout, seconds, 0, 0};
        const auto calls = find(seen_[static_cast<std::size_t>(lane + 1)].value);
        if (calls && !calls->awaited.empty()) failure.step = calls->awaited.front().step;
        group_->fail(failure);
        return;
    }
    stop_kernels(stops && missed() == 0);
}

void GpuWatch::stop_kernels(bool stops) const noexcept {
    std::atomic_ref(static_cast<std::uint32_t*>(page_.host)[kStopPlace])
        .store(stops ? 1 : 0, std::memory_order_release);
}

// Runs commands on the device; sets `stuck_` and returns false if it does not complete them.
bool GpuWatch::ask(const GpuSideChannel::Commands& commands) {
    stuck_ = !ways_->ask(commands);
    return !stuck_;
}

// The words of a copy of the own window, or null if they cannot be read. A blocked read does not
// imply that other commands are blocked.
const std::uint32_t* GpuWatch::read_words(const GpuWindow& window, int copy) {
    if (!ways_) return nullptr;
    auto way = ways_->answering();
    stuck_ = !way;
    if (stuck_) return nullptr;
    return static_cast<const std::uint32_t*>(
        reader_.read(std::move(way), window.words(rank_, copy), answers_within_s_, stop_));
}

// A kernel has given up a word. Its plan is that of the call that last waited on the caller's
// stream, if that call awaits the word; otherwise the last plan that does is assumed.
void GpuWatch::look_at_told() {
    if (missed() == 0) return;
    const int index = static_cast<int>(missed() - 1);
    Failure failure{rank_, 0, rank_, index, Failure::Kind::timeout, group_->timeout_s(), 0, 1U};
    std::shared_ptr<const GpuWindow> window;
    bool known = false;
    {
        const std::lock_guard lock(mutex_);
        const int waiting = static_cast<int>(last_waiting_ / kWindowCopies);
        for (const auto& [number, calls] : calls_) {
            for (const AwaitedWord& awaited : calls.awaited) {
                const bool reports = awaited.lane == AwaitedWord::kMissed || calls.by_kernel;
                if (!reports || awaited.index != index || (known && number != waiting)) continue;
                known = known || number == waiting;
                failure.step = awaited.step;
                failure.expected = awaited.value;
                window = calls.window;
            }
        }
    }
    if (window) {
        for (const int copy : {0, 1}) {
            const std::uint32_t* words = read_words(*window, copy);
            if (words == nullptr) break;
            const std::uint32_t seen = words[index];
            if (seen != 0 && seen != failure.expected) failure.found = seen;
        }
    }
    group_->fail(failure);
}

// Finds the first word that a lane misses and fails the group with it; if the words cannot be read,
// with the first step that waits. Returns false if the cause may soon be reported: the raiser of a
// data word may itself wait, in the end for a rank that has not entered or freed its window.
bool GpuWatch::tell(int lane, std::uint32_t value, double seconds) {
    Failure failure{rank_, -1, -1, -1, Failure::Kind::timeout, seconds, 0, 0};
    const auto fail = [&](const Failure& missing) {
        group_->fail(missing);
        return true;
    };
    const auto calls = find(value);
    if (!calls) return fail(failure);
    const int copy = static_cast<int>(value % kWindowCopies);
    for (const int other : {0, 1}) {
        const std::uint32_t* words = nullptr;
        for (const AwaitedWord& awaited : calls->awaited) {
            if (awaited.lane != lane || awaited.other_copy != other) continue;
            if (failure.step < 0) failure.step = awaited.step;
            if (words == nullptr) words = read_words(*calls->window, copy ^ other);
            if (words == nullptr) {
                failure.word_rank = rank_;
                return fail(failure);
            }
            const std::uint32_t seen = words[awaited.index];
            if (seen == awaited.value) continue;
            const bool of_data = awaited.index < kEnteredWords || awaited.index >= kReadyWords;
            if (of_data && seconds < group_->timeout_s() + kCausesFirstS) return false;
            return fail({rank_, awaited.step, rank_, awaited.index, Failure::Kind::timeout, seconds,
                         seen, awaited.value});
        }
    }
    return fail(failure);
}

// Fails the group if a lane, or a kernel after it, misses a word whose raiser has left.
bool GpuWatch::waits_for_who_left(int lane, std::uint32_t value, double seconds) {
    const auto calls = find(value);
    if (!calls) return false;
    const int copy = static_cast<int>(value % kWindowCopies);
    for (const AwaitedWord& awaited : calls->awaited) {
        const bool missed = lane == kInline && awaited.lane == AwaitedWord::kMissed;
        if (!(missed || awaited.lane == lane)) continue;
        if (!group_->has_left(raiser_of(rank_, awaited.index))) continue;
        const std::uint32_t* words = read_words(*calls->window, copy ^ awaited.other_copy);
        if (words == nullptr) return false;
        const std::uint32_t seen = words[awaited.index];
        if (seen == awaited.value) continue;
        group_->fail({rank_, awaited.step, rank_, awaited.index, Failure::Kind::timeout, seconds,
                      seen, awaited.value});
        return true;
    }
    return false;
}

// The number of a lane's current call, or 0.
std::uint32_t GpuWatch::waiting(int lane) const noexcept {
    return word(lane).load(std::memory_order_acquire) & ~kMark;
}

bool GpuWatch::waits() const noexcept {
    for (int lane = kInline; lane < kMaxLanes; ++lane) {
        if (waiting(lane) != 0) return true;
    }
    return false;
}

// After the group has failed, releases all waits of this device, with NaN in its window.
void GpuWatch::let_go() {
    if (!ways_) {
        stop_kernels(true);
        return;
    }
    if (const GpuAddress word = stop_word(); word != 0 && (waits() || stopped_ != word)) {
        const std::array command{WordCommand{WordCommand::Kind::write, word, 1U}};
        if (!ask([&](Gpu& gpu, GpuStream stream) { gpu.words(command, stream); })) return;
        stopped_ = word;
    }
    for (int lane = kInline; lane < kMaxLanes && !stuck_; ++lane) {
        if (const std::uint32_t value = waiting(lane); value != 0) release(value, lane);
    }
}

void GpuWatch::release(std::uint32_t value, int lane) {
    const auto calls = find(value);
    if (!calls) return;
    const int copy = static_cast<int>(value % kWindowCopies);
    std::vector<WordCommand> commands;
    for (const AwaitedWord& awaited : calls->awaited) {
        if (awaited.lane == lane) {
            commands.push_back(
                {WordCommand::Kind::write,
                 calls->window->word(rank_, copy ^ awaited.other_copy, awaited.index),
                 awaited.value});
        }
    }
    ask([&](Gpu& gpu, GpuStream stream) {
        for (const int each_copy : {0, 1}) {
            gpu.fill(calls->window->data(rank_, each_copy), kNanByte, calls->window->data_bytes(),
                     stream);
        }
        gpu.words(commands, stream);
    });
}

// One line, as several ranks may write at the same time.
void GpuWatch::say_stuck() {
    if (said_ || stop_.load(std::memory_order_acquire) != 0) return;
    said_ = true;
    std::string first = "the group failed";
    if (const auto failure = group_->failure()) {
        first = "rank " + std::to_string(failure->rank) + " stopped";
        if (failure->kind == Failure::Kind::differs) {
            first = "rank " + std::to_string(failure->rank) + " runs another call than rank " +
                    std::to_string(failure->word_rank);
        } else if (failure->kind == Failure::Kind::refused) {
            first = "rank " + std::to_string(failure->rank) + " made no call where rank " +
                    std::to_string(failure->word_rank) + " made one";
        } else if (failure->kind == Failure::Kind::timeout) {
            std::array<char, 64> waited{};
            std::snprintf(waited.data(), waited.size(), " waited %.3g s for a signal",
                          failure->seconds);
            first = "rank " + std::to_string(failure->rank) + waited.data();
        }
    }
    const std::string refusal = ways_->refusal();
    const std::string line =
        "ficco: rank " + std::to_string(rank_) + ": " + first +
        ", and the streams of this rank cannot be let go: its GPU does not do what the watch asks" +
        (refusal.empty() ? "" : ", and cannot be opened once more (" + refusal + ")") +
        "; if the processes do not end by themselves, end them and start anew\n";
    std::fputs(line.c_str(), stderr);
}

}  // namespace ficco
