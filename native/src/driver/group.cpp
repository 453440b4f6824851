// Windows, words, failure and lanes of a node. Their use is in lanes/.
#include "ficco/group.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/interrupt.hpp"

namespace ficco {

namespace {

// Shorter than a sleep and its wake; a longer spin would take the core from the word's raiser.
constexpr std::int64_t kSpinNs = 300;
constexpr double kLocalPatience = 10.0;  // of a wait for a step of the same rank

// More than any memory, but far from overflow when rounded up and multiplied.
constexpr std::size_t kMostBytes = std::size_t{1} << 56;

int checked_world(int world) {
    if (world < 1 || world > kMaxWorld) {
        throw std::invalid_argument("world is " + std::to_string(world) + ", not 1 to " +
                                    std::to_string(kMaxWorld));
    }
    return world;
}

}  // namespace

Group::Group(int world, int only_rank, double timeout_s, std::shared_ptr<Fabric> fabric)
    : world_(checked_world(world)),
      only_rank_(only_rank),
      fabric_(std::move(fabric)),
      windows_(static_cast<std::size_t>(world)),
      lanes_(static_cast<std::size_t>(world) * kMaxLanes) {
    if (fabric_ && fabric_->world() != world) {
        throw std::invalid_argument("the fabric links " + std::to_string(fabric_->world()) +
                                    " ranks, the group has " + std::to_string(world));
    }
    set_timeout_s(timeout_s);
}

Group::Group(int world, double timeout_s, std::shared_ptr<Fabric> fabric)
    : Group(world, -1, timeout_s, std::move(fabric)) {
    control_memory_ = Mapping(sizeof(Control));
    control_ = new (control_memory_.data()) Control;
    words_ =
        Mapping(static_cast<std::size_t>(world) * kWindowCopies * kWordsPerCopy * sizeof(Word));
    for (int rank = 0; rank < world; ++rank) set_first_words(rank);
}

Group::Group(const Membership& membership, double timeout_s, std::shared_ptr<Fabric> fabric)
    : Group(membership.world, membership.rank, timeout_s, std::move(fabric)) {
    const int rank = membership.rank;
    check_rank(rank);
    const SharedLayout layout(world_, membership.data_bytes);
    check_memory(membership.memory, layout);
    control_memory_ = Mapping(membership.memory, 0, sizeof(Control));
    control_ = reinterpret_cast<Control*>(control_memory_.data());
    control_->check(world_, layout.capacity());
    if (control_->state(rank).presence != Presence::absent) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " has joined already");
    }
    reserve(membership.memory, layout.words_of(rank), layout.words_of_bytes());
    reserve(membership.memory, layout.data_of(rank), layout.data_of_bytes());
    words_ = Mapping(membership.memory, layout.words(), layout.words_bytes());
    for (int peer = 0; peer < world_; ++peer) {
        windows_[static_cast<std::size_t>(peer)] =
            Mapping(membership.memory, layout.data_of(peer), layout.data_of_bytes());
    }
    capacity_ = layout.capacity();
    set_first_words(rank);
    watchdog_ = std::make_unique<Watchdog>(*control_, world_, rank);
}

void Group::check_rank(int rank) const {
    if (rank >= 0 && rank < world_) return;
    throw std::invalid_argument("rank is " + std::to_string(rank) + ", not 0 to " +
                                std::to_string(world_ - 1));
}

void Group::check_own(int rank) const {
    check_rank(rank);
    if (only_rank_ < 0 || rank == only_rank_) return;
    throw std::invalid_argument("rank " + std::to_string(rank) + " runs in another process; this " +
                                "one is rank " + std::to_string(only_rank_));
}

void Group::check_copy(int copy) const {
    if (copy >= 0 && copy < kWindowCopies) return;
    throw std::invalid_argument("copy is " + std::to_string(copy) + ", not 0 or 1");
}

void Group::check_idle(const char* what) const {
    if (running_ == 0) return;
    throw std::runtime_error(std::string(what) + " while " + std::to_string(running_) +
                             " programs run; finish them first");
}

void Group::check_not_shared(const char* what) const {
    if (only_rank_ < 0) return;
    throw std::runtime_error(std::string(what) +
                             ", but processes share it; let all ranks join other memory");
}

void Group::set_timeout_s(double timeout_s) {
    if (!(timeout_s > 0.0) || !std::isfinite(timeout_s)) {
        throw std::invalid_argument("timeout_s is " + std::to_string(timeout_s) + ", not above 0");
    }
    timeout_s_.store(timeout_s, std::memory_order_relaxed);
}

// ---- windows

void Group::grow(std::size_t data_bytes) {
    const std::lock_guard lock(mutex_);
    check_not_shared("the windows were to grow");
    check_idle("the windows were to grow");
    if (data_bytes <= capacity_) return;
    if (data_bytes > kMostBytes) {
        throw OutOfMemory("windows of " + std::to_string(data_bytes) + " bytes were asked for");
    }
    const std::size_t page = Mapping::page_bytes();
    const std::size_t capacity = (data_bytes + page - 1) / page * page;
    std::vector<Mapping> windows;
    for (int rank = 0; rank < world_; ++rank) windows.emplace_back(capacity * kWindowCopies);
    windows_.swap(windows);
    capacity_ = capacity;
}

std::size_t Group::capacity() const {
    const std::lock_guard lock(mutex_);
    return capacity_;
}

std::byte* Group::window(int rank, int copy) const {
    check_rank(rank);
    check_copy(copy);
    const std::lock_guard lock(mutex_);
    std::byte* data = windows_[static_cast<std::size_t>(rank)].data();
    return copy == 0 ? data : data + capacity_;
}

Word& Group::word(int rank, int copy, int index) const {
    check_rank(rank);
    check_copy(copy);
    if (index < 0 || index >= kWordsPerCopy) {
        throw std::invalid_argument("word is " + std::to_string(index) + ", not 0 to " +
                                    std::to_string(kWordsPerCopy - 1));
    }
    return reinterpret_cast<Word*>(
        words_.data())[(rank * kWindowCopies + copy) * kWordsPerCopy + index];
}

// Between calls every word is 0 except `free` of every peer, which is raised.
void Group::set_first_words(int rank) noexcept {
    for (int copy = 0; copy < kWindowCopies; ++copy) {
        Word* words = &word(rank, copy, 0);
        for (int index = 0; index < kWordsPerCopy; ++index) {
            const int peer = index - kFreeWords;
            const bool raised = peer >= 0 && peer < world_ && peer != rank;
            // Most are 0 already, and pages that are never written use no memory.
            const std::uint32_t value = raised ? 1 : 0;
            if (words[index].load(std::memory_order_relaxed) != value) {
                words[index].store(value, std::memory_order_release);
            }
        }
    }
}

// ---- words

void Group::raise(Word& word, std::uint32_t value) noexcept {
    [[maybe_unused]] const std::uint32_t before = word.exchange(value, std::memory_order_release);
    assert((before == 0 || value == 0) && "a word was raised twice");
    futex_wake_all(word);
}

bool Group::await(const Word& word, std::uint32_t value, const Waiter& waiter) noexcept {
    if (word.load(std::memory_order_acquire) == value) return true;
    const std::int64_t start = now_ns();
    std::int64_t now = start;
    while (now < start + kSpinNs) {
        spin_pause();
        if (word.load(std::memory_order_acquire) == value) return true;
        now = now_ns();
    }
    for (;;) {
        const std::uint32_t seen = word.load(std::memory_order_acquire);
        if (seen == value) return true;
        if (failed()) return false;
        now = now_ns();
        const double seconds = static_cast<double>(now - start) * 1e-9;
        // A step of the same rank is late because a word is late, which fails the group first, or
        // because it computes, which may take long.
        const bool local = waiter.word_rank < 0;
        double left = timeout_s() * (local ? kLocalPatience : 1.0) - seconds;
        if (control_->someone_left() && !local &&
            (control_->someone_died() ||
             control_->has_left(raiser_of(waiter.word_rank, waiter.word_index)))) {
            left = std::min(left, kLeftGraceS - seconds);
        }
        if (left <= 0.0) {
            if (word.load(std::memory_order_acquire) == value) return true;  // raised, then left
            fail({waiter.rank, waiter.step, waiter.word_rank, waiter.word_index,
                  Failure::Kind::timeout, seconds, seen, value});
            return false;
        }
        const double look_again = std::min(left * 1e9, static_cast<double>(kLookAgainNs));
        futex_wait(word, seen, now + static_cast<std::int64_t>(look_again) + 1);
        if (InterruptScope::interrupted()) fail(waiter.rank);
    }
}

// ---- failure

void Group::fail(const Failure& failure) noexcept { control_->fail(failure); }

void Group::fail(int rank) {
    check_rank(rank);
    fail({rank, -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0});
}

void Group::reset() {
    const std::lock_guard lock(mutex_);
    check_not_shared("the group was to be reset");
    check_idle("the group was to be reset");
    for (int rank = 0; rank < world_; ++rank) set_first_words(rank);
    control_->forget_failure();
}

// ---- ranks

RankState Group::state(int rank) const {
    check_rank(rank);
    RankState state = control_->state(rank);
    if (only_rank_ < 0) {
        const std::lock_guard lock(mutex_);
        state.presence = closed_ ? Presence::closed : Presence::here;
    }
    return state;
}

void Group::close() {
    const std::lock_guard lock(mutex_);
    check_idle("the group was to be closed");
    closed_ = true;
    watchdog_.reset();
}

// ---- lanes and calls

Lane& Group::lane(int rank, int index) {
    check_own(rank);
    if (index < 0 || index >= kMaxLanes) {
        throw std::invalid_argument("lane is " + std::to_string(index) + ", not 0 to " +
                                    std::to_string(kMaxLanes - 1));
    }
    const std::lock_guard lock(mutex_);
    auto& lane = lanes_[static_cast<std::size_t>(rank * kMaxLanes + index)];
    if (!lane) {
        lane =
            std::make_unique<Lane>("ficco r" + std::to_string(rank) + " l" + std::to_string(index));
    }
    return *lane;
}

void Group::enter(int rank, std::uint32_t digest, std::size_t window_bytes) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("the group is closed");
    if (failed()) throw std::runtime_error("the group has failed; reset it first");
    if (window_bytes > capacity_) {
        throw std::runtime_error("the program touches " + std::to_string(window_bytes) +
                                 " bytes of a window copy, and the windows have " +
                                 std::to_string(capacity_) + "; grow them first");
    }
    ++running_;
    control_->began(rank, digest);
}

void Group::set_preparing(int rank, bool does) {
    check_own(rank);
    control_->set_preparing(rank, does);
}

void Group::refuse(int rank, std::string_view reason) {
    check_own(rank);
    const std::lock_guard lock(mutex_);
    if (!closed_) control_->refuse(rank, reason);
}

std::string Group::refusal(int rank, int peer) const {
    check_rank(rank);
    check_rank(peer);
    return control_->refusal(rank, peer);
}

std::string Group::last_refusal(int rank) const {
    check_rank(rank);
    return control_->last_refusal(rank);
}

bool Group::refuses_next(int rank, int peer) const {
    check_rank(rank);
    check_rank(peer);
    return control_->refused(rank, peer, true).has_value();
}

void Group::leave() noexcept {
    const std::lock_guard lock(mutex_);
    --running_;
}

}  // namespace ficco
