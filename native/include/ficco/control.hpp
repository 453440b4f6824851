// The state of a group that all its ranks must see alike: the first failure, and who is still here.
// It lies in the group's memory, which processes may share, and knows nothing of windows or plans.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ficco/futex.hpp"
#include "ficco/limits.hpp"
#include "ficco/robust.hpp"

namespace ficco {

// Why a group has failed. Numbers that do not apply are -1, or 0 for values.
struct Failure {
    enum class Kind { timeout, stopped, differs, refused };
    int rank;  // refused: the one that makes no call where `word_rank` has begun one
    int step;
    int word_rank;   // -1: a wait for the step `word_index` of the same program
    int word_index;  // -1: none is missing, or the words of `word_rank` could not be read
    Kind kind;
    double seconds;
    std::uint32_t found;  // differs: the digest of the call of `word_rank`; refused: its number
    std::uint32_t expected;
};

// A rank's process. `absent` until it has joined.
enum class Presence : std::uint32_t { absent, here, closed, died };

// What is known of a rank.
struct RankState {
    Presence presence;
    double age_s;          // since its last heartbeat; 0 where ranks are threads of one process
    std::uint32_t calls;   // that it has begun
    std::uint32_t digest;  // of the last one
};

// Plain memory, zero at first; init() makes it.
class Control {
  public:
    void init(int world, std::size_t capacity);

    // Throws std::invalid_argument where this is no control state of such a group.
    void check(int world, std::size_t capacity) const;

    // ---- failure
    // Only the first one is kept. Its teller may die while it tells, so others wait for it a short
    // while only and then report that rank as stopped.
    void fail(const Failure& failure) noexcept;
    const std::atomic<bool>& failed() const noexcept { return failed_; }
    std::optional<Failure> failure() const noexcept;
    void forget_failure() noexcept;  // while nobody can fail

    // ---- ranks
    void began(int rank, std::uint32_t digest) noexcept;
    // Notes that the rank has raised an error instead of making its next call. The group does not
    // fail if the rank makes that call after all, or if all ranks refuse it equally often.
    void refuse(int rank, std::string_view reason) noexcept;
    std::string refusal(int rank) const;  // why; the first reason counts
    // The failure of this rank's call, if a peer has refused to make it more often than this rank
    // did: a call that this rank has begun, or, if `next`, the next call of both.
    std::optional<Failure> refused(int rank, int peer, bool next) const noexcept;
    // A rank has captured a call, which it may replay: its calls are not those that it begins.
    void captured() noexcept { captured_.store(true, std::memory_order_release); }
    RankState state(int rank) const noexcept;
    // Looks for the first call, from number `compared` on, that two ranks have begun with different
    // digests, and moves `compared` behind what both have begun.
    std::optional<Failure> difference(int rank, int peer, std::uint32_t& compared) const noexcept;

    // Of a rank whose process has a watchdog; by the watchdog's thread.
    void arrive(int rank) noexcept;
    void beat(int rank) noexcept;
    void depart(int rank) noexcept;
    // Finds out which ranks have died since they arrived: the kernel tells, by their mutex.
    void look_for_deaths(int world) noexcept;
    bool someone_died() const noexcept { return deaths_.load(std::memory_order_acquire) > 0; }
    // Notes whether a rank prepares its next call. It may compile kernels, which may take longer
    // than a wait may last.
    void set_preparing(int rank, bool does) noexcept;
    bool someone_prepares() const noexcept {
        return preparing_.load(std::memory_order_acquire) > 0;
    }
    // The failure of this rank's call, if a peer has left without having begun that call.
    std::optional<Failure> missed(int rank, int peer) const noexcept;
    // Whether a rank has closed or died, and whether any has.
    bool has_left(int rank) const noexcept;
    bool someone_left() const noexcept { return left_.load(std::memory_order_acquire) > 0; }

  private:
    static constexpr std::uint32_t kRemembered = 256;  // calls that a rank may be ahead of another
    static constexpr std::size_t kReasonBytes = 600;

    struct alignas(64) Rank {
        std::atomic<std::int64_t> seen_ns;
        std::atomic<Presence> presence;
        Word calls;
        Word digests[kRemembered];  // of the last ones, by number
        Word refused[kRemembered];  // how often each was refused before it was made
        Word refusals;              // of the next one
        std::atomic<bool> preparing;
        RobustMutex alive;          // held from arrive() to depart()
        char reason[kReasonBytes];  // of the first of them
    };

    std::uint64_t magic_;
    std::uint64_t world_;
    std::uint64_t capacity_;
    std::atomic<bool> failed_;
    Word claimed_;  // rank + 1 of whoever tells the first failure
    Word told_;     // 1: failure_ is complete
    Failure failure_;
    Word deaths_;
    Word left_;       // deaths, and ranks that have closed
    Word preparing_;  // ranks that prepare a call and live
    std::atomic<bool> captured_;
    Rank ranks_[kMaxWorld];
};

}  // namespace ficco
