// Calls of a program: the caller's side and the lanes' side. The binding is in binding.cpp.
#include "ficco/program.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "ficco/clock.hpp"
#include "ficco/copy.hpp"
#include "ficco/interrupt.hpp"

namespace ficco {

namespace {

constexpr std::chrono::nanoseconds kLookAgain{kLookAgainNs};

}  // namespace

Program::~Program() {
    if (!running()) return;
    wait_for_lanes();
    group_->leave();
}

// ---- the caller's side

void Program::start(int copy, std::uint32_t digest, std::span<const std::uint64_t> addresses,
                    std::span<const std::int64_t> pitches) {
    group_->check_copy(copy);
    if (running()) throw std::runtime_error("the program runs already; finish it first");
    if (addresses.size() != bases_.size() || pitches.size() != bases_.size()) {
        throw std::invalid_argument("the program has " + std::to_string(bases_.size()) +
                                    " slots, and was given " + std::to_string(addresses.size()) +
                                    " addresses and " + std::to_string(pitches.size()) +
                                    " pitches");
    }
    for (std::size_t slot = 0; slot < bases_.size(); ++slot) {
        if (slot_given_[slot] && addresses[slot] == 0) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " has no address");
        }
    }

    group_->enter(rank_, digest, window_bytes_);
    copy_ = copy;
    digest_ = digest;
    next_segment_ = 0;
    for (std::size_t slot = 0; slot < bases_.size(); ++slot) {
        auto* base = reinterpret_cast<std::byte*>(addresses[slot]);
        bases_[slot] = {base, base};
        pitches_[slot] = pitches[slot];
    }
    for (const WindowSlot& window : window_slots_) {
        const auto slot = static_cast<std::size_t>(window.slot);
        bases_[slot] = {group_->window(window.rank, copy) + window.offset,
                        group_->window(window.rank, copy ^ 1) + window.offset};
        pitches_[slot] = window.pitch;
    }
    for (std::size_t step = 0; step < step_plans_.size(); ++step) {
        StepState& state = step_states_[step];
        state.left.store(std::max(step_plans_[step].rows, 1U), std::memory_order_relaxed);
        state.start_ns.store(0, std::memory_order_relaxed);
        state.end_ns.store(0, std::memory_order_relaxed);
    }
    running_.store(true, std::memory_order_release);
}

bool Program::submit(int segment) {
    if (!running()) throw std::runtime_error("no call runs; start one first");
    const int segments = static_cast<int>(segment_actions_.size()) - 1;
    if (segment < next_segment_ || segment >= segments) {
        throw std::invalid_argument("segment is " + std::to_string(segment) + ", not " +
                                    std::to_string(next_segment_) + " to " +
                                    std::to_string(segments - 1));
    }
    next_segment_ = segment + 1;
    const auto at = static_cast<std::size_t>(segment);
    for (std::size_t index = segment_actions_[at]; index < segment_actions_[at + 1]; ++index) {
        if (group_->failed()) return false;
        const Action& action = actions_[index];
        if (action.lane == nullptr) {
            const PreciseSleep precise;
            run(action.first, action.last);
            continue;
        }
        {
            const std::lock_guard lock(mutex_);
            ++handed_over_;
        }
        action.lane->push({this, action.first, action.last});
    }
    return !group_->failed();
}

void Program::mark(int step) {
    if (step < 0 || step >= steps()) {
        throw std::invalid_argument("step is " + std::to_string(step) + ", not 0 to " +
                                    std::to_string(steps() - 1));
    }
    const StepPlan& plan = step_plans_[static_cast<std::size_t>(step)];
    if (plan.rows > 0) {
        throw std::invalid_argument("step " + std::to_string(step) +
                                    " is done when its rows have ended; it cannot be marked");
    }
    if (!running()) throw std::runtime_error("no call runs; start one first");
    Word& left = step_states_[static_cast<std::size_t>(step)].left;
    left.store(0, std::memory_order_release);
    if (plan.awaited) futex_wake_all(left);
}

bool Program::finish() {
    if (!running()) throw std::runtime_error("no call runs; start one first");
    wait_for_lanes();
    running_.store(false, std::memory_order_release);
    group_->leave();
    return !group_->failed();
}

void Program::wait_for_lanes() noexcept {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, kLookAgain, [this] { return handed_over_ == 0; })) {
        lock.unlock();
        if (InterruptScope::interrupted()) group_->fail(rank_);  // so that the lanes end soon
        lock.lock();
    }
}

void Program::times(std::span<StepTimes> times) const noexcept {
    for (std::size_t step = 0; step < times.size(); ++step) {
        times[step] = {step_states_[step].start_ns.load(std::memory_order_relaxed),
                       step_states_[step].end_ns.load(std::memory_order_relaxed)};
    }
}

// ---- the lanes' side

void Program::run_range(int first, int last) noexcept {
    run(first, last);
    // Under the lock: a waiter may destroy the program as soon as it gets the lock.
    const std::lock_guard lock(mutex_);
    if (--handed_over_ == 0) ended_.notify_all();
}

// Stops if the group has failed; all ranks then skip the remaining rows.
void Program::run(int first, int last) noexcept {
    for (int at = first; at < last; ++at) {
        const Op& op = ops_[static_cast<std::size_t>(at)];
        StepState& state = step_states_[static_cast<std::size_t>(op.step)];
        if (group_->failed()) return;

        // A step may have rows on several lanes: store the first start and the last end.
        const std::int64_t start = now_ns();
        std::int64_t first_start = state.start_ns.load(std::memory_order_relaxed);
        while (
            (first_start == 0 || start < first_start) &&
            !state.start_ns.compare_exchange_weak(first_start, start, std::memory_order_relaxed)) {
        }
        const bool done = run(op);
        const std::int64_t end = now_ns();
        std::int64_t last_end = state.end_ns.load(std::memory_order_relaxed);
        while (end > last_end &&
               !state.end_ns.compare_exchange_weak(last_end, end, std::memory_order_relaxed)) {
        }
        if (!done) return;

        if (op.kind == Op::Kind::after) continue;  // waits do not count as a step's time
        const StepPlan& plan = step_plans_[static_cast<std::size_t>(op.step)];
        if (state.left.fetch_sub(1, std::memory_order_acq_rel) == 1 && plan.awaited) {
            futex_wake_all(state.left);
        }
    }
}

bool Program::run(const Op& op) noexcept {
    switch (op.kind) {
        case Op::Kind::copy:
            run_copy(op.copy);
            return !group_->failed();
        case Op::Kind::raise:
            Group::raise(word_of(op.word), op.word.digest ? digest_ : op.word.value);
            return true;
        case Op::Kind::wait:
            return group_->await(word_of(op.word), op.word.digest ? digest_ : op.word.value,
                                 {rank_, op.step, op.word.rank, op.word.index});
        case Op::Kind::clear:
            word_of(op.word).store(0, std::memory_order_release);
            return true;
        case Op::Kind::after:
            return group_->await(step_states_[static_cast<std::size_t>(op.awaited)].left, 0,
                                 {rank_, op.step, -1, op.awaited});
        case Op::Kind::expect:
        case Op::Kind::missed:
            break;  // refused when bound
    }
    return false;
}

void Program::run_copy(const CopyOp& copy) noexcept {
    Fabric* const fabric = copy.link_from < 0 ? nullptr : group_->fabric();
    const int transfer =
        fabric == nullptr ? -1
                          : fabric->begin(copy.link_from, copy.link_to, copy.rows * copy.row_bytes,
                                          copy.latency_ns, group_->failed_flag());
    const auto slot_of = [](const Place& place) { return static_cast<std::size_t>(place.slot); };
    const auto address = [&](const Place& place) {
        const std::size_t slot = slot_of(place);
        return bases_[slot][static_cast<std::size_t>(place.other_copy)] +
               place.row * pitches_[slot] + place.byte;
    };
    if (copy.rows > 0 && copy.row_bytes > 0) {
        copy_box(address(copy.to), pitches_[slot_of(copy.to)], address(copy.from),
                 pitches_[slot_of(copy.from)], copy.rows, copy.row_bytes);
    }
    if (fabric != nullptr) fabric->end(transfer, group_->failed_flag());
}

Word& Program::word_of(const WordOp& word) const noexcept {
    return group_->word(word.rank, copy_ ^ word.other_copy, word.index);
}

}  // namespace ficco
