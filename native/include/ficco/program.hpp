// A bound plan of one rank: its rows sorted by lane, and its calls, segment by segment. Rows are
// defined in op.hpp; the memory that they use belongs to the group.
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

// A plan as Python passes it; Program reads and checks the numbers.
struct Binding {
    int rank;
    std::span<const std::int64_t> ops;           // rows x kOpFields
    std::span<const std::int64_t> window_slots;  // rows x kWindowSlotFields
    int segments;
    int steps;
    int slots;
};

// First start and last end of a step, CLOCK_MONOTONIC ns; 0 if it did not run.
struct StepTimes {
    std::int64_t start_ns;
    std::int64_t end_ns;
};

// Only one thread at a time may call it, except for mark(), which any thread may call. It throws
// std::invalid_argument for arguments out of range, and std::runtime_error for calls in a wrong
// state.
class Program final : private Lane::Runner {
  public:
    Program(std::shared_ptr<Group> group, const Binding& binding);
    ~Program();  // waits for its lanes
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    bool running() const noexcept { return running_.load(std::memory_order_acquire); }
    std::size_t window_bytes() const noexcept { return window_bytes_; }
    int steps() const noexcept { return static_cast<int>(step_plans_.size()); }

    // Begins a call. There is one address and pitch per slot; those of windows are ignored.
    void start(int copy, std::uint32_t digest, std::span<const std::uint64_t> addresses,
               std::span<const std::int64_t> pitches);

    // Hands over a segment, in increasing order. Returns false if the group has failed.
    bool submit(int segment);

    // Marks a step that the caller ran as done: one without rows, or with only `after` rows.
    void mark(int step);

    // Ends a call when all submitted rows have ended. Returns false if the group has failed.
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
        std::uint32_t rows = 0;  // rows that must end before it is done; 0: mark() completes it
        bool awaited = false;    // whether an `after` row waits for it
    };
    struct StepState {
        Word left{0};  // number of rows, or 1 until mark(); 0: done
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
    std::vector<Op> ops_;  // sorted by lane; within a lane in the order of the plan
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

    std::mutex mutex_;  // guards `handed_over_`
    std::condition_variable ended_;
    int handed_over_ = 0;  // number of ranges that lanes have not completed
};

}  // namespace ficco
