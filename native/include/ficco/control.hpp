// The state that all ranks of a group share: the first failure, and the presence of each rank. It
// is stored in the group's memory, which processes may share, and is independent of windows and
// plans.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
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
    int rank;  // refused: the rank that has refused the call that `word_rank` has begun
    int step;
    int word_rank;   // -1: a wait for the step `word_index` of the same program
    int word_index;  // -1: no word is missing, or the words of `word_rank` could not be read
    Kind kind;
    double seconds;
    std::uint32_t found;  // differs: the digest of the call of `word_rank`; refused: its number
    std::uint32_t expected;
};

// The presence of a rank's process. `absent` until it has joined.
enum class Presence : std::uint32_t { absent, here, closed, died };

// The known state of a rank.
struct RankState {
    Presence presence;
    double age_s;          // since its last heartbeat; 0 if ranks are threads of one process
    std::uint32_t calls;   // number of calls that it has begun
    std::uint32_t digest;  // of its last call
    bool preparing;        // whether it prepares its next call
};

// Plain memory, initially zero; init() initializes it.
class Control {
  public:
    void init(int world, std::size_t capacity);

    // Identifies memory by the sizes of what lies in it.
    static constexpr std::uint64_t magic_of(std::initializer_list<std::uint64_t> sizes) noexcept {
        std::uint64_t magic = 0x6f'6363'6966;  // "ficco"
        for (const std::uint64_t size : sizes) magic = (magic ^ size) * 0x100'0000'01b3;
        return magic;
    }

    // Throws std::invalid_argument if this is not the control state of such a group.
    void check(int world, std::size_t capacity) const;

    // ---- failure
    // Only the first failure is stored. Its reporter may die while it writes, so others wait for it
    // only a short time and then report that rank as stopped.
    void fail(const Failure& failure) noexcept;
    const std::atomic<bool>& failed() const noexcept { return failed_; }
    std::optional<Failure> failure() const noexcept;
    void forget_failure() noexcept;  // only while no rank can fail

    // ---- ranks
    void began(int rank, std::uint32_t digest) noexcept;
    // Records that the rank has raised an error in place of its next call. The group does not fail
    // if the rank makes that call after all, or if all ranks refuse it equally often.
    void refuse(int rank, std::string_view reason) noexcept;
    // Why a peer refuses the call of this rank, if `refused`; else an older reason, or none.
    std::string refusal(int rank, int peer) const;
    std::string last_refusal(int rank) const;
    // The failure of this rank's call, if a peer has refused it more often than this rank: a call
    // that this rank has begun, or, if `next`, the next call of both.
    std::optional<Failure> refused(int rank, int peer, bool next) const noexcept;
    // A rank has captured a call, which it may replay: its counted calls are then incomplete.
    void captured() noexcept { captured_.store(true, std::memory_order_release); }
    RankState state(int rank) const noexcept;
    // Finds the first call, from number `compared` on, that two ranks have begun with different
    // digests, and advances `compared` past the calls that both have begun.
    std::optional<Failure> difference(int rank, int peer, std::uint32_t& compared) const noexcept;

    // For a rank whose process has a watchdog; called by the watchdog's thread.
    void arrive(int rank) noexcept;
    void beat(int rank) noexcept;
    void depart(int rank) noexcept;
    // Detects ranks that have died since they arrived, by their robust mutex.
    void look_for_deaths(int world) noexcept;
    bool someone_died() const noexcept { return deaths_.load(std::memory_order_acquire) > 0; }
    // Sets whether a rank prepares its next call. It may compile kernels, which may take longer
    // than the timeout of a wait.
    void set_preparing(int rank, bool does) noexcept {
        ranks_[rank].preparing.store(does, std::memory_order_release);
    }
    // Whether a rank that has not left prepares its next call.
    bool someone_prepares(int world) const noexcept;
    // The failure of this rank's call, if a peer has left without beginning that call.
    std::optional<Failure> missed(int rank, int peer) const noexcept;
    // Whether a rank has closed or died, and whether any has.
    bool has_left(int rank) const noexcept;
    bool someone_left() const noexcept { return left_.load(std::memory_order_acquire) > 0; }

  private:
    static constexpr std::uint32_t kRemembered =
        256;                                      // calls that one rank may be ahead of another
    static constexpr std::uint32_t kReasons = 4;  // the last ones of a rank are kept
    static constexpr std::size_t kReasonBytes = 600;

    struct alignas(64) Rank {
        std::atomic<std::int64_t> seen_ns;
        std::atomic<Presence> presence;
        Word calls;
        Word digests[kRemembered];  // of the last calls, by number
        Word refused[kRemembered];  // refusals of each call before it was made
        Word refusals;              // of the next call
        std::atomic<bool> preparing;
        RobustMutex alive;                     // held from arrive() to depart()
        char reasons[kReasons][kReasonBytes];  // of refusals, by their number
    };

    const Word& refusals_before(const Rank& own, std::uint32_t call) const noexcept {
        const bool begun = own.calls.load(std::memory_order_acquire) != call;
        return begun ? own.refused[call % kRemembered] : own.refusals;
    }

    std::uint64_t magic_;
    std::uint64_t world_;
    std::uint64_t capacity_;
    std::atomic<bool> failed_;
    Word claimed_;  // 1 + the rank that reports the first failure
    Word told_;     // 1: failure_ is complete
    Failure failure_;
    Word deaths_;
    Word left_;  // number of ranks that have died or closed
    std::atomic<bool> captured_;
    Rank ranks_[kMaxWorld];
};

}  // namespace ficco
