// The binding of a program, which is computed once. Calls are in program.cpp.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/program.hpp"

namespace ficco {

namespace {

void check_count(int count, const char* what) {
    if (count >= 0) return;
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(count) +
                                ", not 0 or more");
}

}  // namespace

Program::Program(std::shared_ptr<Group> group, const Binding& binding)
    : group_(std::move(group)), rank_(binding.rank) {
    if (!group_) throw std::invalid_argument("a program needs a group");
    group_->check_own(rank_);
    check_count(binding.segments, "segments");
    check_count(binding.steps, "steps");
    check_count(binding.slots, "slots");
    const OpLimits limits{group_->world(), binding.segments, binding.steps, binding.slots};
    const std::vector<Op> ops = read_ops(binding.ops, limits);
    window_slots_ = read_window_slots(binding.window_slots, limits);
    plan_steps(ops, binding.steps);
    plan_slots(ops, binding);
    plan_actions(ops, binding.segments);
}

void Program::plan_steps(const std::vector<Op>& ops, int steps) {
    step_plans_.resize(static_cast<std::size_t>(steps));
    step_states_ = std::make_unique<StepState[]>(step_plans_.size());
    for (const Op& op : ops) {
        if (op.kind == Op::Kind::expect || op.kind == Op::Kind::missed) {
            throw std::invalid_argument("rows that expect a word are for kernels on a GPU");
        }
        if (op.kind == Op::Kind::after) {
            step_plans_[static_cast<std::size_t>(op.awaited)].awaited = true;
        } else {
            ++step_plans_[static_cast<std::size_t>(op.step)].rows;
        }
    }
}

void Program::plan_slots(const std::vector<Op>& ops, const Binding& binding) {
    const auto slots = static_cast<std::size_t>(binding.slots);
    bases_.resize(slots);
    pitches_.resize(slots);
    slot_given_.resize(slots);
    std::vector<const WindowSlot*> windows(slots, nullptr);
    for (const WindowSlot& window : window_slots_) {
        const WindowSlot*& entry = windows[static_cast<std::size_t>(window.slot)];
        if (entry != nullptr) {
            throw std::invalid_argument("slot " + std::to_string(window.slot) +
                                        " is named twice in window_slots");
        }
        entry = &window;
        pitches_[static_cast<std::size_t>(window.slot)] = window.pitch;
    }
    for (const Op& op : ops) {
        if (op.kind != Op::Kind::copy || op.copy.rows == 0 || op.copy.row_bytes == 0) continue;
        for (const Place* place : {&op.copy.from, &op.copy.to}) {
            const auto slot = static_cast<std::size_t>(place->slot);
            if (windows[slot] == nullptr) {
                slot_given_[slot] = true;
                continue;
            }
            const std::int64_t end =
                windows[slot]->offset +
                end_of_box(*place, op.copy.rows, op.copy.row_bytes, windows[slot]->pitch);
            window_bytes_ = std::max(window_bytes_, static_cast<std::size_t>(end));
        }
    }
}

// Sorts rows by lane, so that a lane gets contiguous ranges. Returns the new place of each row.
std::vector<int> Program::sort_by_lane(const std::vector<Op>& ops) {
    std::vector<std::size_t> order(ops.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&ops](std::size_t a, std::size_t b) { return ops[a].lane < ops[b].lane; });
    std::vector<int> places(ops.size());
    ops_.reserve(ops.size());
    for (const std::size_t row : order) {
        places[row] = static_cast<int>(ops_.size());
        ops_.push_back(ops[row]);
    }
    return places;
}

// Turns each segment into the actions of submit(). Rows up to the first inline row that may block
// are handed over, then the inline rows run, then the next rows are handed over:
//
//   rows     A1  B1  i:raise  A2  i:wait  A3  i:clear
//   actions  A1..A2 -> lane A, B1 -> lane B, run raise, run wait | A3 -> lane A, run clear
//
// Lanes are concurrent, so handing over A2 before the raise affects only the cost. A3 waits,
// because the plan may rely on that.
void Program::plan_actions(const std::vector<Op>& ops, int segments) {
    const std::vector<int> places = sort_by_lane(ops);
    std::vector<Action> round;  // the actions up to the next blocking row, the inline one last
    const auto end_round = [&] {
        std::stable_partition(round.begin(), round.end(),
                              [](const Action& action) { return action.lane != nullptr; });
        actions_.insert(actions_.end(), round.begin(), round.end());
        round.clear();
    };
    std::size_t row = 0;
    for (int segment = 0; segment < segments; ++segment) {
        segment_actions_.push_back(actions_.size());
        for (; row < ops.size() && ops[row].segment == segment; ++row) {
            const Op& op = ops[row];
            Lane* lane = op.lane == kInline ? nullptr : &group_->lane(rank_, op.lane);
            auto action = std::find_if(round.begin(), round.end(),
                                       [lane](const Action& other) { return other.lane == lane; });
            if (action == round.end()) {
                action = round.insert(action, Action{lane, places[row], places[row]});
            }
            action->last = places[row] + 1;
            if (lane == nullptr && op.may_block()) end_round();
        }
        end_round();
    }
    segment_actions_.push_back(actions_.size());
}

}  // namespace ficco
