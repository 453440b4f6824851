// The watchdog of a rank's streams: it detects a stream that waits forever, fails the group, and
// releases the stream with NaN. It works for submitted calls and for replays of graphs.
//
// Each lane of a rank has a word in host memory. A call writes its number there, in stream order,
// before its first wait on that lane, and 0 after its last command. The watchdog polls these words
// and marks their values; a mark that is still there after the timeout means that the stream has
// not advanced. Only then does it read from the device which word is missing.
//
// Streams share hardware queues, so its commands may queue after the wait that they must end;
// GpuSideChannel finds another way. If there is none, the watchdog writes to stderr, since a thread
// that waits for the stream inside the driver cannot raise an error. If no way can read which word
// is missing, the group fails without that information.
//
// Where streams store no words, kernels wait, and the watchdog never calls the driver: it sets a
// stop word in its page, and a kernel that gives up says which word is missing.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"
#include "ficco/gpu_reader.hpp"
#include "ficco/gpu_side_channel.hpp"
#include "ficco/gpu_window.hpp"
#include "ficco/group.hpp"
#include "ficco/thread.hpp"

namespace ficco {

// A word that a call waits for on one of its lanes, in the order of that lane.
struct AwaitedWord {
    static constexpr int kMissed = -2;

    int lane;  // kInline: the caller's stream; kMissed: a kernel waits, and reports a miss itself
    int step;
    int index;
    std::uint32_t value;
    int other_copy;
};

// The watchdog's record of a bound plan.
struct WatchedCalls {
    std::shared_ptr<const GpuWindow> window;
    std::vector<AwaitedWord> awaited;
    bool by_kernel = false;  // whether one kernel waits for all, and reports one that it misses
};

class GpuWatch {
  public:
    static constexpr double kAnswersWithinS = 2.0;

    // The device must complete a request within `answers_within_s`.
    GpuWatch(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank,
             double answers_within_s = kAnswersWithinS);
    // Does not wait for a blocked read.
    ~GpuWatch();
    GpuWatch(const GpuWatch&) = delete;
    GpuWatch& operator=(const GpuWatch&) = delete;

    // Registers a plan; returns the unique number that its calls write to their lanes' words. Calls
    // of a removed plan may still be enqueued, so the records of the last ones are kept.
    int add(WatchedCalls calls);
    void remove(int number);
    static std::uint32_t mark_of(int number, int copy) noexcept {
        return static_cast<std::uint32_t>(number) * kWindowCopies +
               static_cast<std::uint32_t>(copy);
    }
    // Stops the watchdog's use of a window, which may be freed afterwards. No call on it may be
    // enqueued any more. It may take as long as the device takes to respond. Throws GpuError if a
    // read of the window is blocked for much longer; then it must not be freed.
    void forget(const GpuWindow& window);
    GpuAddress lane_word(int lane) const noexcept;
    // Where a kernel writes 1 + the index of a word that did not arrive.
    GpuAddress missed_word() const noexcept;
    std::uint32_t missed() const noexcept;
    // A device word, initially 0, that becomes 1 when the group fails: kernels then give up. Where
    // streams store no words, the watchdog has this word in its page, and `set_stop_word` has no
    // effect; the word is also 1 while a kernel that waits too long has not ended.
    void set_stop_word(GpuAddress word);
    GpuAddress stop_word() const noexcept;  // 0 if none is set; never blocks

  private:
    struct Seen {
        std::uint32_t value = 0;     // 0: no mark
        std::int64_t marked_ns = 0;  // when the mark was set
        std::int64_t since_ns = 0;   // the same, without the time in which ranks prepared calls
    };

    void loop() noexcept;
    double waited_s(int lane);
    void leave_out_preparation();
    void look();
    void look_at_told();
    bool tell(int lane, std::uint32_t value, double seconds);
    bool waits_for_who_left(int lane, std::uint32_t value, double seconds);
    void look_at_kernels();
    void stop_kernels(bool stops) const noexcept;
    void let_go();
    void release(std::uint32_t value, int lane);
    bool ask(const GpuSideChannel::Commands& commands);
    const std::uint32_t* read_words(const GpuWindow& window, int copy);
    bool waits() const noexcept;
    std::uint32_t waiting(int lane) const noexcept;
    void say_stuck();
    std::optional<WatchedCalls> find(std::uint32_t value);
    std::atomic_ref<std::uint32_t> word(int lane) const noexcept;

    const std::shared_ptr<Gpu> gpu_;
    const std::shared_ptr<Group> group_;
    const int rank_;
    const double answers_within_s_;
    HostPage page_{};  // words of lanes, the missed word, the probe word and the stop word
    std::vector<Seen> seen_;
    std::uint32_t last_waiting_ = 0;  // the call that was last seen waiting on the caller's stream
    bool stuck_ = false;              // the device does not complete the watchdog's requests
    bool said_ = false;               // the message has been written to stderr
    GpuAddress stopped_ = 0;          // the stop word that was written
    int pauses_ = 0;

    std::mutex asking_;  // held while the watchdog may use the device; locked before mutex_
    std::atomic<GpuAddress> stop_word_ = 0;  // changes only while asking_ is held
    std::mutex mutex_;                       // guards all below; held only for short times
    std::map<int, WatchedCalls> calls_;
    std::deque<int> removed_;
    int next_ = 1;

    Word stop_{0};
    // For the watchdog's requests to the device; null where streams store no words.
    std::unique_ptr<GpuSideChannel> ways_;
    GpuReader reader_;  // guarded by asking_
    std::unique_ptr<Thread> thread_;
};

}  // namespace ficco
