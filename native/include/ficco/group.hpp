// What the ranks of one node share: windows and their words, lane threads, the first failure.
// Knows nothing of plans. One process; a fork must not use it in the child, where no lane runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ficco/fabric.hpp"
#include "ficco/futex.hpp"
#include "ficco/lane.hpp"
#include "ficco/limits.hpp"
#include "ficco/mapping.hpp"

namespace ficco {

// Why a group has failed. Numbers that do not apply are -1, or 0 for values.
struct Failure {
    enum class Kind { timeout, stopped };
    int rank;
    int step;
    int word_rank;  // -1: a wait for the step `word_index` of the same program
    int word_index;
    Kind kind;
    double seconds;
    std::uint32_t found;
    std::uint32_t expected;
};

// Who waits for a word, for the message.
struct Waiter {
    int rank;
    int step;
    int word_rank;
    int word_index;
};

// Arguments out of range throw std::invalid_argument, calls out of season std::runtime_error.
class Group {
  public:
    Group(int world, double timeout_s, std::shared_ptr<Fabric> fabric);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int world() const noexcept { return world_; }
    Fabric* fabric() const noexcept { return fabric_.get(); }

    // Windows. `data_bytes` are those of one copy; growing loses data and moves them.
    void grow(std::size_t data_bytes);
    std::size_t capacity() const;
    std::byte* window(int rank, int copy) const;
    Word& word(int rank, int copy, int index) const;

    double timeout_s() const noexcept { return timeout_s_.load(std::memory_order_relaxed); }
    void set_timeout_s(double timeout_s);

    // Stores with release order and wakes those who wait. A raised word is never raised again
    // before its holder has cleared it.
    static void raise(Word& word, std::uint32_t value) noexcept;

    // Waits with acquire order until `word` is `value`. False: the group has failed, perhaps
    // because this wait has lasted longer than timeout_s.
    bool await(const Word& word, std::uint32_t value, const Waiter& waiter) noexcept;

    // Only the first failure is kept. Everyone looks at `failed` every few ms at least.
    void fail(const Failure& failure) noexcept;
    void fail(int rank);
    bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
    const std::atomic<bool>& failed_flag() const noexcept { return failed_; }
    std::optional<Failure> failure() const;
    void reset();

    // A lane's thread starts when it is first asked for and lives as long as the group.
    Lane& lane(int rank, int index);

    // A program brackets each call with these. `enter` throws if the group has failed or if a
    // window copy has less than `window_bytes`; between them windows stay where they are.
    void enter(std::size_t window_bytes);
    void leave() noexcept;

    void check_rank(int rank) const;
    void check_copy(int copy) const;

  private:
    void set_first_words() noexcept;
    void check_idle(const char* what) const;

    const int world_;
    const std::shared_ptr<Fabric> fabric_;
    std::atomic<double> timeout_s_{0.0};
    std::atomic<bool> failed_{false};

    mutable std::mutex mutex_;  // holds all below; words' values are their own
    int running_ = 0;           // programs in a call
    std::optional<Failure> failure_;
    std::size_t capacity_ = 0;
    Mapping words_;                             // [rank][copy][word]
    std::vector<Mapping> windows_;              // per rank: [copy][capacity]
    std::vector<std::unique_ptr<Lane>> lanes_;  // [rank][lane]; last, so that it ends first
};

}  // namespace ficco
