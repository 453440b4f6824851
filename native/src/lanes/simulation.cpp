// The event loop: timers, ends of copies, ends of work. Simultaneous events are processed as one,
// so that link shares are computed once for copies that begin together.
#include "ficco/simulation.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/limits.hpp"

namespace ficco {

namespace {

// Times that differ by less are equal; they are sums of the same costs in different orders. For
// large times, the limit is the resolution of a double.
constexpr double kEqualNs = 1e-3;
constexpr double kEqual = 1e-15;

double equal_ns(double now_ns) { return std::max(kEqualNs, now_ns * kEqual); }

[[noreturn]] void refuse(const char* what, std::size_t at, double value) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(at) + ": " +
                                std::to_string(value) + " is out of its range");
}

// A whole number from 0 to `end` - 1.
std::int32_t index(double value, std::size_t end, const char* what, std::size_t at) {
    if (!(value >= 0.0 && value < static_cast<double>(end)) || value != std::floor(value)) {
        refuse(what, at, value);
    }
    return static_cast<std::int32_t>(value);
}

double amount(double value, const char* what, std::size_t at) {
    if (!(value >= 0.0) || !std::isfinite(value)) refuse(what, at, value);
    return value;
}

std::vector<std::int32_t> kinds_of(const SimulatedLinks& links) {
    for (const auto& rates : links.rates) {
        const auto good = [](double rate) { return rate > 0.0 && std::isfinite(rate); };
        if (rates.empty() || !std::all_of(rates.begin(), rates.end(), good)) {
            throw std::invalid_argument("rates of ports are numbers above 0");
        }
    }
    std::vector<std::int32_t> kinds;
    for (std::size_t at = 0; at < links.kinds.size(); ++at) {
        kinds.push_back(
            index(static_cast<double>(links.kinds[at]), links.rates.size(), "port", at));
    }
    return kinds;
}

}  // namespace

Simulation::Simulation(const SimulatedPlan& plan, const SimulatedLinks& links,
                       const SimulatedCosts& costs)
    : costs_(costs),
      routes_(links.routes.begin(), links.routes.end()),
      model_(kinds_of(links), links.rates) {
    const std::size_t world = plan.starts.size();
    if (routes_.size() != world * world * 3) {
        throw std::invalid_argument("routes are [world * world, 3]");
    }
    for (std::size_t at = 0; at < routes_.size(); ++at) {
        if (routes_[at] < -1 || routes_[at] >= static_cast<std::int64_t>(links.kinds.size())) {
            refuse("route", at / 3, static_cast<double>(routes_[at]));
        }
    }
    for (std::size_t at = 0; at < world; ++at) {
        ranks_.emplace_back().start_ns = amount(plan.starts[at], "start of rank", at);
    }
    for (std::size_t at = 0; at < plan.lanes.size(); ++at) {
        lanes_.push_back({index(static_cast<double>(plan.lanes[at]), world, "lane", at)});
    }
    for (std::size_t at = 0; at < plan.words.size() / kWordFields; ++at) {
        const auto* const word = &plan.words[at * kWordFields];
        words_.push_back({index(static_cast<double>(word[0]), world, "word", at), word[1] != 0});
    }
    for (std::size_t at = 0; at < plan.transfers.size() / kTransferFields; ++at) {
        const double* const each = &plan.transfers[at * kTransferFields];
        if (!(each[2] > 0.0)) refuse("transfer", at, each[2]);
        transfers_.push_back(
            {amount(each[0], "transfer", at), amount(each[1], "transfer", at), each[2]});
    }
    read_actions(plan);
    read_rows(plan);
}

void Simulation::read_actions(const SimulatedPlan& plan) {
    const std::size_t count = plan.actions.size() / kActionFields;
    actions_.reserve(count);
    for (std::size_t at = 0; at < count; ++at) {
        const double* const each = &plan.actions[at * kActionFields];
        const Act act{index(each[0], kActs, "action", at)};
        std::size_t end = 1;
        if (act == Act::copy) {
            end = ranks_.size();
            index(each[2], transfers_.size(), "transfer of action", at);
        } else if (act == Act::wait || act == Act::raise || act == Act::clear) {
            end = words_.size();
        }
        actions_.push_back(
            {act, index(each[1], end, "number of action", at), amount(each[2], "action", at)});
    }
}

void Simulation::read_rows(const SimulatedPlan& plan) {
    const std::size_t count = plan.rows.size() / kRowFields;
    rows_.reserve(count);
    times_.resize(count);
    std::vector<std::int32_t> last(lanes_.size(), kNone);
    std::vector<bool> copying(lanes_.size());
    std::int32_t after = 0;
    std::int32_t action = 0;
    for (std::size_t at = 0; at < count; ++at) {
        const double* const each = &plan.rows[at * kRowFields];
        const std::int32_t lane = index(each[0], lanes_.size(), "lane of row", at);
        const auto row = static_cast<std::int32_t>(at);
        const std::int32_t after_end =
            after + index(each[2], plan.afters.size() + 1, "afters of row", at);
        const std::int32_t action_end =
            action + index(each[3], actions_.size() + 1, "actions of row", at);
        const double release_ns =
            rank_at(lane_at(lane).rank).start_ns + amount(each[1], "release of row", at);
        rows_.push_back({release_ns, after, after_end, action, action_end});
        (last[static_cast<std::size_t>(lane)] < 0
             ? lane_at(lane).row
             : row_at(last[static_cast<std::size_t>(lane)]).next) = row;
        last[static_cast<std::size_t>(lane)] = row;
        if (static_cast<std::size_t>(after_end) > plan.afters.size() ||
            static_cast<std::size_t>(action_end) > actions_.size()) {
            throw std::invalid_argument("rows count more actions or afters than there are");
        }
        for (; after < after_end; ++after) {
            const auto number = static_cast<double>(plan.afters[static_cast<std::size_t>(after)]);
            afters_.push_back(index(number, at, "after of row", at));
        }
        for (; action < action_end; ++action) {
            if (actions_[static_cast<std::size_t>(action)].act == Act::copy) {
                copying[static_cast<std::size_t>(lane)] = true;
            }
        }
    }
    if (std::count(copying.begin(), copying.end(), true) > fluid::kMaxFlows) {
        throw std::invalid_argument("more than " + std::to_string(fluid::kMaxFlows) +
                                    " lanes that copy");
    }
    flows_.resize(lanes_.size());
}

// ---- events

void Simulation::set_timer(double ns, Due due, std::int32_t index) {
    timers_.push({ns, timers_set_++, due, index});
}

void Simulation::run() {
    for (std::size_t at = 0; at < lanes_.size(); ++at) {
        Lane& lane = lanes_[at];
        if (lane.row == kNone) continue;
        lane.after = row_at(lane.row).first_after;
        lane.action = row_at(lane.row).first_action;
        set_timer(rank_at(lane.rank).start_ns, Due::lane, static_cast<std::int32_t>(at));
    }
    for (;;) {
        while (!ready_.empty()) {
            const std::int32_t lane = ready_.front();
            ready_.pop_front();
            go_on(lane);
        }
        if (stale_) share_links();
        if (!ready_.empty()) continue;  // their bytes ran out when rates changed
        double next_ns = flows_next_ns_;
        if (!timers_.empty()) next_ns = std::min(next_ns, timers_.top().ns);
        for (const Rank& rank : ranks_) next_ns = std::min(next_ns, rank.next_ns);
        if (next_ns == fluid::kNever) return;
        now_ns_ = std::max(now_ns_, next_ns);
        if (flows_next_ns_ <= now_ns_ + equal_ns(now_ns_)) end_flows();
        for (Rank& rank : ranks_) {
            if (rank.next_ns <= now_ns_ + equal_ns(now_ns_)) end_work(rank);
        }
        while (!timers_.empty() && timers_.top().ns <= now_ns_ + equal_ns(now_ns_)) {
            const Timer timer = timers_.top();
            timers_.pop();
            if (timer.due == Due::lane) ready_.push_back(timer.index);
            if (timer.due == Due::bytes) ready_to_flow(timer.index);
            if (timer.due == Due::word) raise(timer.index);
        }
    }
}

std::vector<Stuck> Simulation::stuck() const {
    std::vector<Stuck> stuck;
    for (const Lane& lane : lanes_) {
        if (lane.row == kNone) continue;
        const Row& row = rows_[static_cast<std::size_t>(lane.row)];
        if (lane.after < row.after_end) {
            stuck.push_back({lane.row, kNone, afters_[static_cast<std::size_t>(lane.after)]});
        } else {
            const Action& action = actions_[static_cast<std::size_t>(lane.action - 1)];
            stuck.push_back({lane.row, action.number, kNone});
        }
    }
    return stuck;
}

// ---- lanes

void Simulation::go_on(std::int32_t number) {
    Lane& lane = lane_at(number);
    while (lane.row != kNone) {
        if (!may_begin(number)) return;
        const std::int32_t end = row_at(lane.row).action_end;
        while (lane.action < end) {
            if (!act(number, actions_[static_cast<std::size_t>(lane.action++)])) return;
        }
        end_row(number);
    }
}

// Returns false if the lane must wait; the end of the wait wakes it.
bool Simulation::may_begin(std::int32_t number) {
    Lane& lane = lane_at(number);
    const Row& row = row_at(lane.row);
    for (; lane.after < row.after_end; ++lane.after) {
        const std::int32_t other = afters_[static_cast<std::size_t>(lane.after)];
        if (times_[static_cast<std::size_t>(other)].end_ns == fluid::kNever) {
            lane.next_waiter = std::exchange(row_at(other).waiters, number);
            return false;
        }
    }
    if (row.release_ns > now_ns_ + equal_ns(now_ns_)) {
        set_timer(row.release_ns, Due::lane, number);
        return false;
    }
    double& start_ns = times_[static_cast<std::size_t>(lane.row)].start_ns;
    start_ns = std::min(start_ns, now_ns_);
    return true;
}

// Returns true if the action takes no time; otherwise its end wakes the lane.
bool Simulation::act(std::int32_t number, const Action& action) {
    Lane& lane = lane_at(number);
    if (action.act != Act::wait && !lane.begun) {
        lane.begun = true;
        times_[static_cast<std::size_t>(lane.row)].start_ns = now_ns_;
    }
    double takes_ns = 0.0;
    switch (action.act) {
        case Act::wait: {
            Word& word = words_[static_cast<std::size_t>(action.number)];
            if (!word.raised) {
                lane.next_waiter = std::exchange(word.waiters, number);
                return false;
            }
            takes_ns = costs_.wait_ns;
            break;
        }
        case Act::raise:
            if (words_[static_cast<std::size_t>(action.number)].rank == lane.rank) {
                raise(action.number);
            } else {
                set_timer(now_ns_ + costs_.raise_ns, Due::word, action.number);
            }
            return true;
        case Act::clear:
            words_[static_cast<std::size_t>(action.number)].raised = false;
            return true;
        case Act::delay:
            takes_ns = action.amount;
            break;
        case Act::work:
            start_work(number, action.amount);
            return false;
        case Act::copy: {
            const auto transfer = static_cast<std::size_t>(action.amount);
            set_timer(now_ns_ + transfers_[transfer].latency_ns, Due::bytes, number);
            return false;
        }
    }
    if (takes_ns == 0.0) return true;
    set_timer(now_ns_ + takes_ns, Due::lane, number);
    return false;
}

void Simulation::end_row(std::int32_t number) {
    Lane& lane = lane_at(number);
    Row& row = row_at(lane.row);
    times_[static_cast<std::size_t>(lane.row)].end_ns = now_ns_;
    wake(row.waiters);
    lane.row = row.next;
    lane.begun = false;
    if (lane.row == kNone) return;
    lane.after = row_at(lane.row).first_after;
    lane.action = row_at(lane.row).first_action;
}

void Simulation::raise(std::int32_t number) {
    Word& word = words_[static_cast<std::size_t>(number)];
    word.raised = true;
    wake(word.waiters);
}

void Simulation::wake(std::int32_t& waiters) {
    for (std::int32_t lane = std::exchange(waiters, kNone); lane != kNone;) {
        ready_.push_back(lane);
        lane = std::exchange(lane_at(lane).next_waiter, kNone);
    }
}

// ---- copies

const Simulation::Action& Simulation::copy_of(const Lane& lane) const {
    return actions_[static_cast<std::size_t>(lane.action - 1)];
}

// The latency of a lane's copy has passed; its bytes flow as soon as an engine is free.
void Simulation::ready_to_flow(std::int32_t number) {
    Rank& rank = rank_at(lane_at(number).rank);
    if (costs_.copy_engines > 0 && rank.engines == costs_.copy_engines) {
        rank.queue.push_back(number);
    } else {
        start_flow(number);
    }
}

void Simulation::start_flow(std::int32_t number) {
    settle_flows();
    const Lane& lane = lane_at(number);
    const Action& copy = copy_of(lane);
    const Transfer& transfer = transfers_[static_cast<std::size_t>(copy.amount)];
    const auto route =
        static_cast<std::size_t>(lane.rank) * ranks_.size() + static_cast<std::size_t>(copy.number);
    fluid::Flow& flow = flows_[static_cast<std::size_t>(number)];
    for (std::size_t at = 0; at < 3; ++at) {
        flow.ports[at] = static_cast<std::int32_t>(routes_[3 * route + at]);
    }
    flow.start_ns = now_ns_;
    flow.left_bytes = transfer.bytes;
    flow.limit = transfer.limit;
    flow.rate = 0.0;
    flow.end_ns = fluid::kNever;
    live_.push(number);
    stale_ = true;
    ++rank_at(lane.rank).engines;
    take_cores(1);
    add_flows(lane.rank, 1);
    add_flows(copy.number, 1);
}

// Advances all flows to the present, before a change.
void Simulation::settle_flows() {
    if (flows_at_ns_ < now_ns_) end_flows();
}

void Simulation::end_flows() {
    ended_.clear();
    fluid::Model::move(flows_, live_, flows_at_ns_, now_ns_, ended_);
    flows_at_ns_ = now_ns_;
    if (ended_.empty()) return;
    stale_ = true;
    // Copies that then start need no advance: all flows are at the present.
    for (const std::int32_t number : ended_) {
        const Lane& lane = lane_at(number);
        Rank& rank = rank_at(lane.rank);
        --rank.engines;
        take_cores(-1);
        add_flows(lane.rank, -1);
        add_flows(copy_of(lane).number, -1);
        ready_.push_back(number);
        if (!rank.queue.empty()) {
            const std::int32_t next = rank.queue.front();
            rank.queue.pop_front();
            start_flow(next);
        }
    }
}

void Simulation::share_links() {
    settle_flows();
    stale_ = false;
    if (costs_.copies_beside_work > 1.0 || costs_.cores > 0) {
        const double share = core_share();
        for (const std::int32_t number : live_) {
            const Lane& lane = lane_at(number);
            const Action& copy = copy_of(lane);
            const bool beside =
                !rank_at(lane.rank).tasks.empty() || !rank_at(copy.number).tasks.empty();
            flows_[static_cast<std::size_t>(number)].limit =
                transfers_[static_cast<std::size_t>(copy.amount)].limit * share /
                (beside ? costs_.copies_beside_work : 1.0);
        }
    }
    model_.share(flows_, live_, now_ns_);
    flows_next_ns_ = fluid::Model::next(flows_, live_, now_ns_);
}

void Simulation::add_flows(std::int32_t number, int count) {
    Rank& rank = rank_at(number);
    settle_work(rank);
    rank.flows += count;
    foresee_work(rank);
}

// ---- work

// The share of a core of each work and each copy; 1 if every rank is a device.
double Simulation::core_share() const noexcept {
    if (costs_.cores == 0 || on_cores_ <= costs_.cores) return 1.0;
    return static_cast<double>(costs_.cores) / on_cores_;
}

// The speed of each task, relative to its speed without contention.
double Simulation::pace(const Rank& rank) const noexcept {
    const double beside = rank.flows > 0 ? costs_.work_beside_copies : 1.0;
    if (costs_.cores > 0) return core_share() / beside;
    return 1.0 / (beside * static_cast<double>(rank.tasks.size()));
}

// Changes the number of works and copies that use a core. If that changes their share, the work of
// all ranks is settled before, and predicted again after the change.
void Simulation::take_cores(int number) {
    if (costs_.cores == 0) return;
    if (std::max(on_cores_, on_cores_ + number) <= costs_.cores) {
        on_cores_ += number;
        return;
    }
    for (Rank& rank : ranks_) settle_work(rank);
    on_cores_ += number;
    for (Rank& rank : ranks_) foresee_work(rank);
    stale_ = true;
}

void Simulation::settle_work(Rank& rank) {
    const double lasted_ns = now_ns_ - std::exchange(rank.at_ns, now_ns_);
    for (Task& task : rank.tasks) task.left_ns -= lasted_ns * pace(rank);
}

void Simulation::foresee_work(Rank& rank) {
    rank.next_ns = fluid::kNever;
    for (const Task& task : rank.tasks) {
        rank.next_ns = std::min(rank.next_ns, now_ns_ + std::max(task.left_ns, 0.0) / pace(rank));
    }
}

void Simulation::start_work(std::int32_t number, double ns) {
    Rank& rank = rank_at(lane_at(number).rank);
    settle_work(rank);
    if (rank.tasks.empty()) stale_ |= costs_.copies_beside_work > 1.0;
    rank.tasks.push_back({number, ns});
    take_cores(1);
    foresee_work(rank);
}

void Simulation::end_work(Rank& rank) {
    settle_work(rank);
    const auto ended = std::erase_if(rank.tasks, [this](const Task& task) {
        if (task.left_ns > equal_ns(now_ns_)) return false;
        ready_.push_back(task.lane);
        return true;
    });
    take_cores(-static_cast<int>(ended));
    if (rank.tasks.empty()) stale_ |= costs_.copies_beside_work > 1.0;
    foresee_work(rank);
}

}  // namespace ficco
