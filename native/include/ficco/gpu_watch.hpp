// Notices that a stream waits for ever, says so to the whole group, and lets the stream go on with
// NaN. It works for calls that a graph replays just as for those that the host submits.
//
// Each lane of a rank has a word in memory of the host. A call writes its number there, in stream
// order, before its first wait on that lane, and 0 behind its last command. The watch looks at
// these words now and then, and marks what it finds; a mark that is still there after the timeout
// means that the stream has not moved since. Only then does it ask the device which word is
// missing.
//
// What it asks for may stand behind the very wait that it is to end, as streams share hardware
// queues; GpuSideChannel finds a way round. Where there is none, stderr is told, since whoever
// waits for the stream inside of the driver can raise nothing. Reading which word is missing may
// stand behind that wait by every way; then the group is told without it.
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

    int lane;  // kInline: the caller's stream; kMissed: a kernel waits, and tells by itself
    int step;
    int index;
    std::uint32_t value;
    int other_copy;
};

// What is known of a bound plan.
struct WatchedCalls {
    std::shared_ptr<const GpuWindow> window;
    std::vector<AwaitedWord> awaited;
};

class GpuWatch {
  public:
    static constexpr double kAnswersWithinS = 2.0;

    // The device has to do within `answers_within_s` what it is asked for.
    GpuWatch(std::shared_ptr<Gpu> gpu, std::shared_ptr<Group> group, int rank,
             double answers_within_s = kAnswersWithinS);
    // Waits for no read that stands.
    ~GpuWatch();
    GpuWatch(const GpuWatch&) = delete;
    GpuWatch& operator=(const GpuWatch&) = delete;

    // Numbers that the calls of a plan write to their lanes' words, never given twice. What is
    // removed may still be enqueued; the last ones are known for some time.
    int add(WatchedCalls calls);
    void remove(int number);
    static std::uint32_t mark_of(int number, int copy) noexcept {
        return static_cast<std::uint32_t>(number) * kWindowCopies +
               static_cast<std::uint32_t>(copy);
    }
    // Ends what the watch does with a window, which may be freed afterwards: no call on it is
    // enqueued any more. It may take as long as the device takes to answer. Throws GpuError where a
    // read of it stands for much longer than that; then it must not be freed.
    void forget(const GpuWindow& window);
    GpuAddress lane_word(int lane) const noexcept;
    // Where a kernel writes 1 + the index of a word that did not come.
    GpuAddress missed_word() const noexcept;
    std::uint32_t missed() const noexcept;
    // A word of the device, 0, that becomes 1 when the group has failed: kernels give up then.
    void set_stop_word(GpuAddress word);

  private:
    struct Seen {
        std::uint32_t value = 0;  // 0: nothing is marked
        std::int64_t since_ns = 0;
    };

    void loop() noexcept;
    void look();
    void look_at_told();
    bool tell(int lane, std::uint32_t value, double seconds);
    bool waits_for_who_left(int lane, std::uint32_t value, double seconds);
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
    HostPage page_{};  // words of lanes, the told and the probe word
    std::vector<Seen> seen_;
    bool stuck_ = false;      // the device does not do what the watch asks
    bool said_ = false;       // to stderr
    GpuAddress stopped_ = 0;  // the stop word that was written
    int pauses_ = 0;

    std::mutex asking_;  // held while the watch may have the device do something; before mutex_
    std::mutex mutex_;   // holds all below
    std::map<int, WatchedCalls> calls_;
    GpuAddress stop_word_ = 0;
    std::deque<int> removed_;
    int next_ = 1;

    Word stop_{0};
    std::unique_ptr<GpuSideChannel> ways_;  // by which the watch asks the device
    GpuReader reader_;                      // under asking_
    std::unique_ptr<Thread> thread_;
};

}  // namespace ficco
