// The binding of a program for a GPU, which is computed once. Calls are in gpu_program.cpp.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/gpu_program.hpp"

namespace ficco {

GpuProgram::GpuProgram(std::shared_ptr<GpuRank> rank, std::shared_ptr<const GpuWindow> window,
                       const Binding& binding, std::uint32_t digest)
    : rank_(std::move(rank)), window_(std::move(window)), digest_(digest) {
    if (!rank_ || !window_) throw std::invalid_argument("a program needs a rank and a window");
    if (binding.segments < 1 || binding.steps < 0 || binding.slots < 0) {
        throw std::invalid_argument("segments is 1 or more, steps and slots are 0 or more");
    }
    if (binding.rank != rank_->rank()) {
        throw std::invalid_argument("the plan is that of rank " + std::to_string(binding.rank) +
                                    ", the GPU that of rank " + std::to_string(rank_->rank()));
    }
    const OpLimits limits{window_->world(), binding.segments, binding.steps, binding.slots};
    ops_ = read_ops(binding.ops, limits);
    window_slots_ = read_window_slots(binding.window_slots, limits);
    const auto slots = static_cast<std::size_t>(binding.slots);
    const auto steps = static_cast<std::size_t>(binding.steps);
    slot_is_window_.resize(slots);
    slot_is_given_.resize(slots, true);
    slot_is_copied_.resize(slots);
    bases_.resize(slots);
    pitches_.resize(slots);
    step_events_.resize(steps, nullptr);
    time_events_.resize(steps, {nullptr, nullptr});
    stamped_.resize(steps);
    streams_.resize(kMaxLanes, nullptr);
    works_.resize(static_cast<std::size_t>(binding.segments));
    expects_.resize(static_cast<std::size_t>(binding.segments));
    for (const WindowSlot& slot : window_slots_) {
        slot_is_window_[static_cast<std::size_t>(slot.slot)] = true;
        slot_is_given_[static_cast<std::size_t>(slot.slot)] = false;
    }

    const GpuFacts facts = rank_->gpu().facts();
    std::map<int, std::size_t> stored;  // words that a kernel stores or waits for, by step
    const auto check_kernel = [&](const Op& op, const char* does, const std::string& lacks) {
        if (op.lane != kInline) {
            throw std::invalid_argument(
                "a kernel stores words, or waits for them, on the caller's stream alone");
        }
        if (!lacks.empty()) {
            throw std::invalid_argument(std::string("no kernel ") + does + ": " + lacks);
        }
        if (++stored[op.step] > kMostStored) {
            throw std::invalid_argument("step " + std::to_string(op.step) +
                                        " has more words than one kernel takes");
        }
    };
    const auto check_stored = [&](const Op& op) {
        if (op.word.how == Raising::write && !facts.words) {
            throw std::invalid_argument("the GPU's streams store no words; copy them");
        }
        if (op.word.how == Raising::write && !window_->writable(op.word.rank)) {
            throw std::invalid_argument("a stream may not write the words of rank " +
                                        std::to_string(op.word.rank) + "; copy or store them");
        }
        if (op.word.how == Raising::store) {
            check_kernel(op, "stores words", rank_->gpu().no_store());
        }
    };
    const auto check_wait = [&](const Op& op) {
        if (op.word.how == Raising::store) {
            check_kernel(op, "waits for words", rank_->gpu().no_await());
            if (rank_->watch().stop_word() == 0) {
                throw std::invalid_argument("a kernel that waits needs a stop word; set one first");
            }
        } else if (op.word.how == Raising::copy) {
            throw std::invalid_argument("a wait is by the stream or by a kernel, not by a copy");
        } else if (!facts.words) {
            throw std::invalid_argument("the GPU's streams wait for no words; a kernel can");
        }
    };
    WatchedCalls watched{window_, {}};
    std::map<int, WatchedCalls> by_step;  // what kernels wait for
    for (const Op& op : ops_) {
        if (op.lane != kInline && std::ranges::find(lanes_, op.lane) == lanes_.end()) {
            lanes_.push_back(op.lane);
            streams_[static_cast<std::size_t>(op.lane)] = rank_->lane(op.lane);
        }
        if (op.kind == Op::Kind::raise || op.kind == Op::Kind::clear) check_stored(op);
        if (op.kind == Op::Kind::wait) check_wait(op);
        const bool by_kernel = op.kind == Op::Kind::expect || op.kind == Op::Kind::missed;
        if (by_kernel && (op.lane != kInline || op.segment + 1 >= binding.segments)) {
            throw std::invalid_argument(
                "a kernel that expects words runs on the caller's stream, between two segments");
        }
        if (op.kind == Op::Kind::expect) expects_[static_cast<std::size_t>(op.segment)] = true;
        if (by_kernel || op.kind == Op::Kind::wait) {
            if (op.word.rank != binding.rank) {
                throw std::invalid_argument("a wait for a word of rank " +
                                            std::to_string(op.word.rank) +
                                            "; a rank waits for its own words");
            }
            const int lane = op.kind == Op::Kind::missed ? AwaitedWord::kMissed : op.lane;
            const bool apart = op.kind == Op::Kind::wait && op.word.how == Raising::store;
            WatchedCalls& calls =
                apart ? by_step.try_emplace(op.step, WatchedCalls{window_, {}, true}).first->second
                      : watched;
            calls.awaited.push_back({lane, op.step, op.word.index,
                                     op.word.digest ? digest_ : op.word.value, op.word.other_copy});
        }
        if (op.kind != Op::Kind::copy || op.copy.rows == 0 || op.copy.row_bytes == 0) continue;
        for (const Place* place : {&op.copy.from, &op.copy.to}) {
            const auto slot = static_cast<std::size_t>(place->slot);
            if (!slot_is_window_[slot]) {
                slot_is_copied_[slot] = true;
                continue;
            }
            const auto in_window = std::ranges::find(window_slots_, place->slot, &WindowSlot::slot);
            const std::int64_t end =
                in_window->offset +
                end_of_box(*place, op.copy.rows, op.copy.row_bytes, in_window->pitch);
            if (static_cast<std::size_t>(end) > window_->data_bytes()) {
                throw std::invalid_argument("a copy touches " + std::to_string(end) +
                                            " bytes of a window copy, which has " +
                                            std::to_string(window_->data_bytes()));
            }
        }
    }
    joins_.resize(lanes_.size(), nullptr);
    number_ = rank_->watch().add(std::move(watched));
    for (auto& [step, calls] : by_step) awaiting_[step] = rank_->watch().add(std::move(calls));
    commands_ = compile(ops_, binding.segments, target(), false);
}

GpuTarget GpuProgram::target() const {
    return {*window_, rank_->watch(), number_, digest_, rank_->gpu()};
}

GpuProgram::~GpuProgram() {
    if (running_) abandon();
    if (!captured_) {  // graphs continue to write its numbers
        rank_->watch().remove(number_);
        for (const auto& [step, number] : awaiting_) rank_->watch().remove(number);
    }
    try {
        const Gpu::Current current(rank_->gpu());
        for (const auto* events : {&step_events_, &joins_}) {
            for (const GpuEvent event : *events) {
                if (event != nullptr) rank_->gpu().delete_event(event);
            }
        }
        for (const auto& pair : time_events_) {
            for (const GpuEvent event : pair) {
                if (event != nullptr) rank_->gpu().delete_event(event);
            }
        }
        for (const GpuEvent event : {fork_, now_}) {
            if (event != nullptr) rank_->gpu().delete_event(event);
        }
    } catch (const GpuError&) {
        // the device is lost
    }
}

}  // namespace ficco
