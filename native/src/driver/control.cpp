// Failure and presence in memory that processes share. The thread is in watchdog.cpp.
#include "ficco/control.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ficco/clock.hpp"
#include "ficco/fabric.hpp"
#include "ficco/mapping.hpp"

namespace ficco {

namespace {

// Builds of ficco may differ in the layout of shared memory.
std::uint64_t own_magic() noexcept {
    constexpr std::uint64_t kVersion = 5;  // raised when fields change and sizes do not
    return Control::magic_of({kVersion, sizeof(Control), Fabric::state_bytes(),
                              Mapping::page_bytes(), kMaxWorld, kMaxChunks, kWordsPerCopy,
                              kWindowCopies});
}

// Time limit of a wait for another rank's failure report, which takes less than a microsecond.
constexpr int kTellTries = 200;
constexpr std::int64_t kTellNs = 1'000'000;

}  // namespace

void Control::init(int world, std::size_t capacity) {
    for (Rank& rank : ranks_) rank.alive.init();
    world_ = static_cast<std::uint64_t>(world);
    capacity_ = capacity;
    magic_ = own_magic();
}

void Control::check(int world, std::size_t capacity) const {
    if (magic_ == own_magic() && world_ == static_cast<std::uint64_t>(world) &&
        capacity_ == capacity) {
        return;
    }
    throw std::invalid_argument("the memory is not that of a group of " + std::to_string(world) +
                                " ranks with windows of " + std::to_string(capacity) +
                                " bytes a copy, made by this build of ficco");
}

// ---- failure

void Control::fail(const Failure& failure) noexcept {
    std::uint32_t nobody = 0;
    if (claimed_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(failure.rank) + 1)) {
        failure_ = failure;
        told_.store(1, std::memory_order_release);
    } else {
        for (int look = 0; look < kTellTries && !told_.load(std::memory_order_acquire); ++look) {
            sleep_until_ns(now_ns() + kTellNs);
        }
    }
    failed_.store(true, std::memory_order_release);
}

std::optional<Failure> Control::failure() const noexcept {
    if (!failed_.load(std::memory_order_acquire)) return std::nullopt;
    if (told_.load(std::memory_order_acquire)) return failure_;
    const int rank = static_cast<int>(claimed_.load(std::memory_order_relaxed)) - 1;
    return Failure{rank, -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0};
}

void Control::forget_failure() noexcept {
    failed_.store(false, std::memory_order_release);
    told_.store(0, std::memory_order_release);
    claimed_.store(0, std::memory_order_release);
}

// ---- ranks

void Control::began(int rank, std::uint32_t digest) noexcept {
    Rank& one = ranks_[rank];
    const std::uint32_t number = one.calls.load(std::memory_order_relaxed);
    one.digests[number % kRemembered].store(digest, std::memory_order_release);
    one.refused[number % kRemembered].store(one.refusals.exchange(0, std::memory_order_acq_rel),
                                            std::memory_order_release);
    one.calls.store(number + 1, std::memory_order_release);
}

void Control::refuse(int rank, std::string_view reason) noexcept {
    Rank& one = ranks_[rank];
    const std::uint32_t before = one.refusals.load(std::memory_order_relaxed);
    char* const text = one.reasons[before % kReasons];
    std::size_t bytes = std::min(reason.size(), kReasonBytes - 1);
    while (bytes < reason.size() && (reason[bytes] & 0xC0) == 0x80) --bytes;  // UTF-8
    std::memcpy(text, reason.data(), bytes);
    text[bytes] = 0;
    one.refusals.store(before + 1, std::memory_order_release);
}

// Ranks that all refuse a call, equally often, agree. So the first refusal of the peer that this
// rank lacks is the reason.
std::string Control::refusal(int rank, int peer) const {
    const Rank& other = ranks_[peer];
    const std::uint32_t call = other.calls.load(std::memory_order_acquire);
    const std::uint32_t mine = refusals_before(ranks_[rank], call).load(std::memory_order_acquire);
    const std::uint32_t often = other.refusals.load(std::memory_order_acquire);
    return often > mine + kReasons ? last_refusal(peer) : other.reasons[mine % kReasons];
}

std::string Control::last_refusal(int rank) const {
    const Rank& one = ranks_[rank];
    return one.reasons[(one.refusals.load(std::memory_order_acquire) - 1) % kReasons];
}

std::optional<Failure> Control::refused(int rank, int peer, bool next) const noexcept {
    const Rank& own = ranks_[rank];
    const Rank& other = ranks_[peer];
    if (captured_.load(std::memory_order_acquire)) return std::nullopt;
    const std::uint32_t number = other.calls.load(std::memory_order_acquire);
    const std::uint32_t often = other.refusals.load(std::memory_order_acquire);
    const std::uint32_t ahead = own.calls.load(std::memory_order_acquire) - number;
    if (next ? ahead != 0 : (ahead == 0 || ahead >= kRemembered)) return std::nullopt;
    if (often <= refusals_before(own, number).load(std::memory_order_acquire)) return std::nullopt;
    // The peer may have begun the call meanwhile, which clears its refusals.
    if (other.calls.load(std::memory_order_acquire) != number) return std::nullopt;
    return Failure{peer, -1, rank, -1, Failure::Kind::refused, 0.0, number, 0};
}

bool Control::someone_prepares(int world) const noexcept {
    for (int rank = 0; rank < world; ++rank) {
        if (ranks_[rank].preparing.load(std::memory_order_acquire) && !has_left(rank)) return true;
    }
    return false;
}

std::optional<Failure> Control::missed(int rank, int peer) const noexcept {
    if (!has_left(peer) || captured_.load(std::memory_order_acquire)) return std::nullopt;
    const std::uint32_t ahead = ranks_[rank].calls.load(std::memory_order_acquire) -
                                ranks_[peer].calls.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(ahead) <= 0) return std::nullopt;
    return Failure{peer, -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0};
}

RankState Control::state(int rank) const noexcept {
    const Rank& one = ranks_[rank];
    const std::uint32_t calls = one.calls.load(std::memory_order_acquire);
    const std::int64_t seen = one.seen_ns.load(std::memory_order_relaxed);
    return {one.presence.load(std::memory_order_acquire),
            seen == 0 ? 0.0 : static_cast<double>(now_ns() - seen) * 1e-9, calls,
            calls == 0 ? 0 : one.digests[(calls - 1) % kRemembered].load(std::memory_order_relaxed),
            one.preparing.load(std::memory_order_relaxed)};
}

std::optional<Failure> Control::difference(int rank, int peer,
                                           std::uint32_t& compared) const noexcept {
    const Rank& own = ranks_[rank];
    const Rank& other = ranks_[peer];
    const auto begun = [](const Rank& one) { return one.calls.load(std::memory_order_acquire); };
    const std::uint32_t mine = begun(own);
    const std::uint32_t its = begun(other);
    const std::uint32_t both = static_cast<std::int32_t>(mine - its) < 0 ? mine : its;
    for (; compared != both; ++compared) {
        const std::uint32_t slot = compared % kRemembered;
        const std::uint32_t wanted = own.digests[slot].load(std::memory_order_acquire);
        const std::uint32_t found = other.digests[slot].load(std::memory_order_acquire);
        const auto written_over = [&](const Rank& one) {
            return begun(one) - compared >= kRemembered;
        };
        if (found == wanted || written_over(own) || written_over(other)) continue;
        if (captured_.load(std::memory_order_acquire)) return std::nullopt;
        return Failure{rank, -1, peer, -1, Failure::Kind::differs, 0.0, found, wanted};
    }
    return std::nullopt;
}

void Control::arrive(int rank) noexcept {
    beat(rank);
    // No other thread locks it before the presence is `here`.
    ranks_[rank].alive.try_lock();
    ranks_[rank].presence.store(Presence::here, std::memory_order_release);
}

void Control::beat(int rank) noexcept {
    ranks_[rank].seen_ns.store(now_ns(), std::memory_order_relaxed);
}

void Control::depart(int rank) noexcept {
    ranks_[rank].presence.store(Presence::closed, std::memory_order_release);
    left_.fetch_add(1, std::memory_order_release);
    ranks_[rank].alive.unlock();
}

void Control::look_for_deaths(int world) noexcept {
    for (int rank = 0; rank < world; ++rank) {
        Rank& one = ranks_[rank];
        if (one.presence.load(std::memory_order_acquire) != Presence::here) continue;
        const RobustMutex::Got got = one.alive.try_lock();
        if (got == RobustMutex::Got::no) continue;  // its holder lives
        if (got == RobustMutex::Got::orphan) {
            one.presence.store(Presence::died, std::memory_order_release);
            deaths_.fetch_add(1, std::memory_order_release);
            left_.fetch_add(1, std::memory_order_release);
        }
        one.alive.unlock();
    }
}

bool Control::has_left(int rank) const noexcept {
    const Presence presence = ranks_[rank].presence.load(std::memory_order_acquire);
    return presence == Presence::closed || presence == Presence::died;
}

}  // namespace ficco
