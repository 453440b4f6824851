// Simulation of plans: lanes, words, copies that share links, kernels that share a device. Numbers
// only: no clock, no thread, no randomness; equal rows give equal times.
#pragma once

#include <cstdint>
#include <deque>
#include <queue>
#include <span>
#include <vector>

#include "ficco/fluid.hpp"

namespace ficco {

// The actions of a lane within a row, in order.
//   wait    until `number`, a word, is raised; takes `Costs::wait_ns` if it already is
//   raise   `number`, a word: immediately for its own rank, `Costs::raise_ns` later for others
//   clear   `number`, a word
//   delay   takes `amount` ns
//   work    takes `amount` ns of the rank's device without contention
//   copy    to rank `number`; `amount` is the index of a transfer
enum class Act : std::int32_t { wait, raise, clear, delay, work, copy };
inline constexpr int kActs = 6;

// All rows of all ranks with their tables, as Python passes them: numbers in C-contiguous rows.
struct SimulatedPlan {
    std::span<const std::int64_t> lanes;   // the rank of each
    std::span<const double> starts;        // of each rank: when its lanes begin, ns
    std::span<const double> rows;          // [count, 4]: lane, not before (ns, from its rank's
                                           // start), number of `afters`, number of actions
    std::span<const std::int64_t> afters;  // earlier rows that have ended before a row begins
    std::span<const double> actions;       // [count, 3]: Act, number, amount
    std::span<const double> transfers;     // [count, 3]: latency ns, bytes, most bytes per ns
    std::span<const std::int64_t> words;   // [count, 2]: its rank, 1 if it is raised at the start
};
inline constexpr int kRowFields = 4;
inline constexpr int kActionFields = 3;
inline constexpr int kTransferFields = 3;
inline constexpr int kWordFields = 2;

// The ports of copies, and their rates.
struct SimulatedLinks {
    std::span<const std::int64_t> routes;    // [from * world + to, 3]: ports; -1: none
    std::span<const std::int64_t> kinds;     // of each port
    std::vector<std::vector<double>> rates;  // as of fluid::Model
};

struct SimulatedCosts {
    double wait_ns = 0.0;
    double raise_ns = 0.0;
    double work_beside_copies = 1.0;  // slowdown factor of work while bytes flow from or to it
    double copies_beside_work = 1.0;  // slowdown factor of a copy's limit while either device works
    int copy_engines = 0;             // maximum simultaneous copies of a rank; 0: unlimited
    int cores = 0;  // of the host that all ranks share: each work and each copy uses one core; if
                    // they outnumber the cores, they share; 0: every rank is a separate device
};

// A row starts with its first action that is not a wait, or without one when its lane reaches it.
struct SimulatedTimes {
    double start_ns = fluid::kNever;
    double end_ns = fluid::kNever;
};

// A row that never ends, and the word or row that it waits for; the other is -1.
struct Stuck {
    std::int32_t row;
    std::int32_t word;
    std::int32_t after;
};

class Simulation {
  public:
    // Throws std::invalid_argument if a number is out of range.
    Simulation(const SimulatedPlan& plan, const SimulatedLinks& links, const SimulatedCosts& costs);

    // Runs to the end, or until no lane can continue. Call it only once.
    void run();

    // By row.
    const std::vector<SimulatedTimes>& times() const noexcept { return times_; }

    // The current row of each lane that has not ended.
    std::vector<Stuck> stuck() const;

  private:
    static constexpr std::int32_t kNone = -1;

    struct Row {
        double release_ns;
        std::int32_t first_after, after_end;
        std::int32_t first_action, action_end;
        std::int32_t next = kNone;     // of its lane
        std::int32_t waiters = kNone;  // lanes that wait for it, linked by Lane::next_waiter
    };

    struct Action {
        Act act;
        std::int32_t number;
        double amount;
    };

    struct Transfer {
        double latency_ns, bytes, limit;
    };

    struct Word {
        std::int32_t rank;
        bool raised;
        std::int32_t waiters = kNone;
    };

    struct Lane {
        std::int32_t rank;
        std::int32_t row = kNone;
        std::int32_t after = 0;   // the next one to check, of the row
        std::int32_t action = 0;  // the next one to run, of the row
        bool begun = false;       // whether the row's start is known
        std::int32_t next_waiter = kNone;
    };

    struct Task {
        std::int32_t lane;
        double left_ns;  // without contention
    };

    // A device: its works, all at the same pace, and its copies.
    struct Rank {
        double start_ns;
        std::vector<Task> tasks;
        double at_ns = 0.0;              // the time of `left_ns` of its tasks
        double next_ns = fluid::kNever;  // the end of the next task
        int flows = 0;                   // number of flows from or to it
        int engines = 0;                 // number of its own copies whose bytes flow
        std::deque<std::int32_t> queue;  // lanes whose copies wait for an engine
    };

    enum class Due : std::int32_t { lane, bytes, word };
    struct Timer {
        double ns;
        std::int64_t order;
        Due due;
        std::int32_t index;
        bool operator>(const Timer& other) const noexcept {
            return ns != other.ns ? ns > other.ns : order > other.order;
        }
    };

    void read_rows(const SimulatedPlan& plan);
    void read_actions(const SimulatedPlan& plan);
    void set_timer(double ns, Due due, std::int32_t index);
    void go_on(std::int32_t lane);
    bool may_begin(std::int32_t lane);
    bool act(std::int32_t lane, const Action& action);
    void end_row(std::int32_t lane);
    void raise(std::int32_t word);
    void wake(std::int32_t& waiters);
    void ready_to_flow(std::int32_t lane);
    void start_flow(std::int32_t lane);
    void settle_flows();
    void end_flows();
    void share_links();
    double core_share() const noexcept;
    double pace(const Rank& rank) const noexcept;
    void take_cores(int number);
    void settle_work(Rank& rank);
    void foresee_work(Rank& rank);
    void start_work(std::int32_t lane, double ns);
    void end_work(Rank& rank);
    void add_flows(std::int32_t rank, int number);
    const Action& copy_of(const Lane& lane) const;
    Rank& rank_at(std::int32_t number) { return ranks_[static_cast<std::size_t>(number)]; }
    Lane& lane_at(std::int32_t number) { return lanes_[static_cast<std::size_t>(number)]; }
    Row& row_at(std::int32_t number) { return rows_[static_cast<std::size_t>(number)]; }

    const SimulatedCosts costs_;
    std::vector<std::int64_t> routes_;
    std::vector<Row> rows_;
    std::vector<std::int32_t> afters_;
    std::vector<Action> actions_;
    std::vector<Transfer> transfers_;
    std::vector<Word> words_;
    std::vector<Lane> lanes_;
    std::vector<Rank> ranks_;
    std::vector<SimulatedTimes> times_;

    double now_ns_ = 0.0;
    std::int64_t timers_set_ = 0;
    std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
    std::deque<std::int32_t> ready_;  // lanes that can continue now

    fluid::Model model_;
    std::vector<fluid::Flow> flows_;  // by lane: its copy
    fluid::Indices live_;             // lanes whose bytes flow
    fluid::Indices ended_;
    int on_cores_ = 0;          // number of works and copies of all ranks that use a core
    double flows_at_ns_ = 0.0;  // the time of `left_bytes`
    double flows_next_ns_ = fluid::kNever;
    bool stale_ = false;  // whether the flows have changed since the rates were computed
};

}  // namespace ficco
