// A bound plan of one rank: its rows sorted by lane, and calling it, segment by segment.
// How a row reads is in op.hpp; what it acts on belongs to the group.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ficco/futex.hpp"
#include "ficco/group.hpp"
#include "ficco/lane.hpp"
#include "ficco/op.hpp"

namespace ficco {

// What Python hands over to bind a plan; the numbers are read and checked by Program.
struct Binding {
    int rank;
    std::span<const std::int64_t> ops;           // rows x kOpFields
    std::span<const std::int64_t> window_slots;  // rows x kWindowSlotFields
    int segments;
    int steps;
    int slots;
};

// First start and last end of a step, CLOCK_MONOTONIC ns; 0 where nothing ran.
struct StepTimes {
    std::int64_t start_ns;
    std::int64_t end_ns;
};

// One thread at a time calls; mark() may be called by any.
// Arguments out of range throw std::invalid_argument, calls out of season std::runtime_error.
class Program final : private Lane::Runner {
  public:
    Program(std::shared_ptr<Group> group, const Binding& binding);
    ~Program();  // waits for its lanes
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    bool running() const noexcept { return running_.load(std::memory_order_acquire); }
    std::size_t window_bytes() const noexcept { return window_bytes_; }
    int steps() const noexcept { return static_cast<int>(step_plans_.size()); }

    // Begins a call. One address and pitch per slot; those of windows are not looked at.
    void start(int copy, std::uint32_t digest, std::span<const std::uint64_t> addresses,
               std::span<const std::int64_t> pitches);

    // Hands over a segment; segments come in increasing order. False: the group has failed.
    bool submit(int segment);

    // A step that the caller ran is done: one with no rows, or with no rows but `after`.
    void mark(int step);

    // Ends a call when all that was submitted has ended. False: the group has failed.
    bool finish();

    void times(std::span<StepTimes> times) const noexcept;

  private:
    // Part of a segment: rows [first, last) of ops_ are handed to `lane`, or run here if null.
    struct Action {
        Lane* lane;
        int first;
        int last;
    };
    struct StepPlan {
        std::uint32_t rows = 0;  // that must end before it is done; 0: it is done by mark()
        bool awaited = false;    // by an `after`
    };
    struct StepState {
        Word left{0};  // of rows, or 1 until mark(); 0: done
        std::atomic<std::int64_t> start_ns{0};
        std::atomic<std::int64_t> end_ns{0};
    };

    void plan_steps(const std::vector<Op>& ops, int steps);
    void plan_slots(const std::vector<Op>& ops, const Binding& binding);
    std::vector<int> sort_by_lane(const std::vector<Op>& ops);
    void plan_actions(const std::vector<Op>& ops, int segments);

    void run_range(int first, int last) noexcept override;  // on a lane
    void run(int first, int last) noexcept;                 // on any thread
    bool run(const Op& op) noexcept;
    void run_copy(const CopyOp& copy) noexcept;
    Word& word_of(const WordOp& word) const noexcept;
    void wait_for_lanes() noexcept;

    const std::shared_ptr<Group> group_;
    const int rank_;

    // Fixed by the binding.
    std::vector<Op> ops_;  // sorted by lane; those of one lane in the order of the plan
    std::vector<Action> actions_;
    std::vector<std::size_t> segment_actions_;  // segment s: actions [s] to [s + 1]
    std::vector<StepPlan> step_plans_;
    std::vector<WindowSlot> window_slots_;
    std::vector<bool> slot_given_;  // its address must not be 0
    std::size_t window_bytes_ = 0;

    // Of the present or last call.
    int copy_ = 0;
    std::uint32_t digest_ = 0;
    int next_segment_ = 0;
    std::vector<std::array<std::byte*, kWindowCopies>> bases_;  // [slot][other copy]
    std::vector<std::int64_t> pitches_;
    std::unique_ptr<StepState[]> step_states_;
    std::atomic<bool> running_{false};

    std::mutex mutex_;  // holds `handed_over_`
    std::condition_variable ended_;
    int handed_over_ = 0;  // ranges that lanes have not ended
};

}  // namespace ficco
