// The shared state of a node's ranks: windows and their words, lane threads, the first failure. It
// is independent of plans. Ranks are threads of one process, or processes that share memory, each
// with its own group object. After a fork, the child must not use it, because no lane runs there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ficco/control.hpp"
#include "ficco/fabric.hpp"
#include "ficco/futex.hpp"
#include "ficco/lane.hpp"
#include "ficco/limits.hpp"
#include "ficco/mapping.hpp"
#include "ficco/shared.hpp"
#include "ficco/watchdog.hpp"

namespace ficco {

// The description of a wait for a word, for messages.
struct Waiter {
    int rank;
    int step;
    int word_rank;
    int word_index;
};

// How long a wait for a rank that has left continues: enough for the others to complete work that
// does not need that rank, such as its last call.
inline constexpr double kLeftGraceS = 1.0;

// It throws std::invalid_argument for arguments out of range, and std::runtime_error for calls in a
// wrong state.
class Group {
  public:
    // All ranks in this process, windows without space for data.
    Group(int world, double timeout_s, std::shared_ptr<Fabric> fabric);

    // One rank, in the memory of its group. Its windows cannot grow or be reset: when all ranks
    // have ended their calls, they join new memory. No rank may begin a call before all have
    // joined.
    Group(const Membership& membership, double timeout_s, std::shared_ptr<Fabric> fabric);

    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int world() const noexcept { return world_; }
    Fabric* fabric() const noexcept { return fabric_.get(); }

    // Windows. `data_bytes` is the size of one copy; growing loses the data and moves the windows.
    void grow(std::size_t data_bytes);
    std::size_t capacity() const;
    std::byte* window(int rank, int copy) const;
    Word& word(int rank, int copy, int index) const;

    double timeout_s() const noexcept { return timeout_s_.load(std::memory_order_relaxed); }
    void set_timeout_s(double timeout_s);

    // Stores with release order and wakes waiters. A raised word is never raised again before its
    // holder has cleared it.
    static void raise(Word& word, std::uint32_t value) noexcept;

    // Waits with acquire order until `word` is `value`. Returns false if the group has failed, for
    // example because this wait has exceeded timeout_s, or a second if a rank has died or the
    // raiser of the word has left, or because the thread was interrupted.
    bool await(const Word& word, std::uint32_t value, const Waiter& waiter) noexcept;

    // Only the first failure is stored. All waits check `failed` at least every few ms.
    void fail(const Failure& failure) noexcept;
    void fail(int rank);
    bool failed() const noexcept { return failed_flag().load(std::memory_order_acquire); }
    const std::atomic<bool>& failed_flag() const noexcept { return control_->failed(); }
    std::optional<Failure> failure() const noexcept { return control_->failure(); }
    void reset();

    // The known state of a rank; and the end of this process's part in the group, which the
    // destructor also signals.
    RankState state(int rank) const;
    void close();
    bool someone_left() const noexcept { return control_->someone_left(); }
    bool has_left(int rank) const noexcept { return control_->has_left(rank); }

    // A lane's thread starts at the first request and lives as long as the group.
    Lane& lane(int rank, int index);

    // A program brackets each call with these. `enter` throws if the group has failed or is closed,
    // or if a window copy has less than `window_bytes`. Between them, windows do not move.
    void enter(int rank, std::uint32_t digest, std::size_t window_bytes);
    void leave() noexcept;
    void set_preparing(int rank, bool does);
    bool someone_prepares() const noexcept { return control_->someone_prepares(world_); }
    // See `Control`; for a rank of this process.
    void refuse(int rank, std::string_view reason);
    std::string refusal(int rank, int peer) const;
    std::string last_refusal(int rank) const;
    bool refuses_next(int rank, int peer) const;
    // A call has been captured into a graph: the ranks' calls are no longer compared.
    void captured() noexcept { control_->captured(); }

    void check_rank(int rank) const;
    void check_own(int rank) const;  // checks that the rank runs in this process
    void check_copy(int copy) const;

  private:
    Group(int world, int only_rank, double timeout_s, std::shared_ptr<Fabric> fabric);
    void set_first_words(int rank) noexcept;
    void check_idle(const char* what) const;
    void check_not_shared(const char* what) const;

    const int world_;
    const int only_rank_;  // the rank of this process; -1: all ranks
    const std::shared_ptr<Fabric> fabric_;
    std::atomic<double> timeout_s_{0.0};

    Mapping control_memory_;
    Control* control_ = nullptr;
    Mapping words_;  // [rank][copy][word]

    mutable std::mutex mutex_;  // guards all below
    int running_ = 0;           // number of programs in a call
    bool closed_ = false;
    std::size_t capacity_ = 0;
    std::vector<Mapping> windows_;  // per rank: [copy][capacity]
    std::unique_ptr<Watchdog> watchdog_;
    std::vector<std::unique_ptr<Lane>> lanes_;  // [rank][lane]; last, so that it ends first
};

}  // namespace ficco
