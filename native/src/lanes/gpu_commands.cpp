// The compiler of rows.
#include "ficco/gpu_commands.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace ficco {

namespace {

// Facts about all rows that the compilation of the first row needs.
struct Survey {
    std::map<int, std::size_t> last_wait;  // by lane: the row
    std::map<int, std::size_t> first_row;  // by step: the row
    std::map<int, std::size_t> last_row;
    std::map<int, int> lane_of;  // by step with rows; other steps run on the caller's stream
    std::set<int> recorded;      // steps that another lane waits for

    explicit Survey(std::span<const Op> ops) {
        for (std::size_t row = 0; row < ops.size(); ++row) {
            const Op& op = ops[row];
            if (op.kind == Op::Kind::missed) continue;
            if (op.kind == Op::Kind::after) {
                if (crosses(op)) recorded.insert(op.awaited);
                continue;
            }
            if (op.kind == Op::Kind::wait || op.kind == Op::Kind::expect) last_wait[op.lane] = row;
            if (op.kind == Op::Kind::expect) continue;  // the caller enqueues the kernel
            first_row.try_emplace(op.step, row);
            last_row[op.step] = row;
            lane_of[op.step] = op.lane;
        }
    }

    // Whether the awaited step runs on another lane, so that an event is needed.
    bool crosses(const Op& after) const {
        const auto entry = lane_of.find(after.awaited);
        return (entry == lane_of.end() ? kInline : entry->second) != after.lane;
    }
};

class Compiler {
  public:
    Compiler(int segments, const GpuTarget& target, bool timed) : target_(target), timed_(timed) {
        result_.segments.resize(static_cast<std::size_t>(segments));
    }

    GpuCommands compile(std::span<const Op> ops) {
        const Survey survey(ops);
        for (std::size_t row = 0; row < ops.size(); ++row) {
            const Op& op = ops[row];
            if (op.kind == Op::Kind::missed) continue;
            if (expecting_ && (op.segment > expecting_->segment + 1 ||
                               (op.segment == expecting_->segment + 1 && op.lane == kInline))) {
                take_back();
            }
            if (op.kind == Op::Kind::after) {
                if (survey.crosses(op) && after_.emplace(op.lane, op.awaited).second) {
                    push(op, GpuAction::Kind::wait, op.awaited, 0);
                }
                continue;
            }
            if (op.kind == Op::Kind::expect) {
                expect(op, survey.last_wait.at(op.lane) == row);
                continue;
            }
            if (timed_ && survey.first_row.at(op.step) == row) {
                push(op, GpuAction::Kind::begin, op.step, 0);
            }
            if (op.kind == Op::Kind::copy) {
                push(op, GpuAction::Kind::copy, static_cast<int>(result_.copies.size()), 0);
                result_.copies.push_back(op.copy);
            } else {
                add_words(
                    op, survey.last_wait.contains(op.lane) && survey.last_wait.at(op.lane) == row);
            }
            if (survey.last_row.at(op.step) != row) continue;
            if (timed_) push(op, GpuAction::Kind::end, op.step, 0);
            if (survey.recorded.contains(op.step)) push(op, GpuAction::Kind::record, op.step, 0);
        }
        if (expecting_) take_back();
        return std::move(result_);
    }

  private:
    std::vector<GpuAction>& segment_of(const Op& op) {
        return result_.segments[static_cast<std::size_t>(op.segment)];
    }

    void push(const Op& op, GpuAction::Kind kind, int first, int last) {
        segment_of(op).push_back({kind, op.lane, first, last});
    }

    // A row joins the previous batch if that is the last action, so that no row is submitted
    // earlier than in the program. The lane's word at the watchdog is set from before the lane's
    // first wait until after its last one.
    void add_words(const Op& op, bool last_wait) {
        const bool waits = op.kind == Op::Kind::wait;
        if (waits && op.word.how == Raising::store) {
            await(op);
            return;
        }
        if (!waits && op.word.how == Raising::copy) {
            add_signal(op);
            return;
        }
        const int begin = count();
        if (waits) set_lane_word(op);
        const std::uint32_t value = value_of(op);
        add(waits ? WordCommand::Kind::wait : WordCommand::Kind::write, word_of(op, 0),
            word_of(op, 1), value, value);
        if (last_wait) clear_lane_word(op);
        if (!waits && op.word.how == Raising::store) {
            store(op, begin);
        } else {
            submit(op, op.segment, begin);
        }
    }

    // One kernel stores the words of a step. It also clears the watchdog's word, if a command of
    // its own would do so just before.
    void store(const Op& op, int begin) {
        auto& actions = segment_of(op);
        const bool follows =
            !actions.empty() && actions.back().lane == op.lane && actions.back().last == begin;
        const bool room = follows && begin - actions.back().first < static_cast<int>(kMostStored);
        if (room && actions.back().kind == GpuAction::Kind::stores && stored_ == op.step) {
            actions.back().last = begin + 1;
            return;
        }
        stored_ = op.step;
        if (follows && actions.back().kind == GpuAction::Kind::words &&
            actions.back().first + 1 == begin && cleared_ == begin - 1) {
            actions.back() = {GpuAction::Kind::stores, op.lane, begin - 1, begin + 1};
            return;
        }
        actions.push_back({GpuAction::Kind::stores, op.lane, begin, begin + 1});
    }

    // One kernel waits for the words of a step. It sets and clears the lane's word by itself, so a
    // later wait has to set that word again.
    void await(const Op& op) {
        watched_.erase(op.lane);
        const auto begin = static_cast<int>(result_.awaited[0].size());
        for (const int copy : {0, 1}) {
            const auto number = static_cast<std::uint32_t>(op.word.index) + 1;
            result_.awaited[static_cast<std::size_t>(copy)].push_back(
                {word_of(op, copy), value_of(op), number});
        }
        result_.awaiting.push_back(op.step);
        auto& actions = segment_of(op);
        const bool joins = awaited_ == op.step && !actions.empty() &&
                           actions.back().kind == GpuAction::Kind::awaits &&
                           actions.back().last == begin;
        awaited_ = op.step;
        if (joins) {
            actions.back().last = begin + 1;
        } else {
            actions.push_back({GpuAction::Kind::awaits, op.lane, begin, begin + 1});
        }
    }

    // A copy of a constant. Consecutive signals are one action.
    void add_signal(const Op& op) {
        const GpuAddress from = target_.gpu.constant(value_of(op));
        const int begin = static_cast<int>(result_.signals[0].size());
        for (const int copy : {0, 1}) {
            result_.signals[static_cast<std::size_t>(copy)].push_back({word_of(op, copy), from});
        }
        join_or_push(op, op.segment, GpuAction::Kind::signals, begin, begin + 1);
    }

    // A kernel waits for the word: the stream sets the lane's word for the watchdog before the
    // kernel, and clears it after the kernel.
    void expect(const Op& op, bool last_wait) {
        const int begin = count();
        set_lane_word(op);
        if (count() > begin) submit(op, op.segment, begin);
        if (last_wait) expecting_ = &op;
    }

    // Submitted after the next segment's rows of other lanes: peers may need these rows before they
    // raise the kernel's words, and on a shared hardware queue the rows would wait for the kernel.
    void take_back() {
        const int begin = count();
        clear_lane_word(*expecting_);
        submit(*expecting_, expecting_->segment + 1, begin);
        expecting_ = nullptr;
    }

    void set_lane_word(const Op& op) {
        if (!watched_.insert(op.lane).second) return;
        add(WordCommand::Kind::write, lane_word(op), lane_word(op),
            GpuWatch::mark_of(target_.number, 0), GpuWatch::mark_of(target_.number, 1));
    }

    void clear_lane_word(const Op& op) {
        cleared_ = count();
        add(WordCommand::Kind::write, lane_word(op), lane_word(op), 0, 0);
    }

    // Submits the commands from `begin`.
    void submit(const Op& op, int segment, int begin) {
        join_or_push(op, segment, GpuAction::Kind::words, begin, count());
    }

    // Appends commands [begin, end) to the lane's last action, if that is of this kind and ends at
    // `begin`; else they become a new action.
    void join_or_push(const Op& op, int segment, GpuAction::Kind kind, int begin, int end) {
        auto& actions = result_.segments[static_cast<std::size_t>(segment)];
        const bool joins = !actions.empty() && actions.back().kind == kind &&
                           actions.back().lane == op.lane && actions.back().last == begin;
        if (joins) {
            actions.back().last = end;
        } else {
            actions.push_back({kind, op.lane, begin, end});
        }
    }

    int count() const { return static_cast<int>(result_.words[0].size()); }

    void add(WordCommand::Kind kind, GpuAddress address0, GpuAddress address1, std::uint32_t value0,
             std::uint32_t value1) {
        result_.words[0].push_back({kind, address0, value0});
        result_.words[1].push_back({kind, address1, value1});
    }

    std::uint32_t value_of(const Op& op) const {
        return op.word.digest ? target_.digest : op.word.value;
    }

    GpuAddress lane_word(const Op& op) const { return target_.watch.lane_word(op.lane); }

    GpuAddress word_of(const Op& op, int copy) const {
        return target_.window.word(op.word.rank, copy ^ op.word.other_copy, op.word.index);
    }

    const GpuTarget& target_;
    const bool timed_;
    int stored_ = -1;        // the step whose words the last store has
    int awaited_ = -1;       // the step whose words the last kernel waits for
    int cleared_ = -1;       // the last command that clears the watchdog's word of a lane
    std::set<int> watched_;  // lanes whose word is set
    std::set<std::pair<int, int>> after_;  // lanes, and steps that they have waited for
    const Op* expecting_ = nullptr;  // the last row that expects, until its lane's word is cleared
    GpuCommands result_;
};

}  // namespace

GpuCommands compile(std::span<const Op> ops, int segments, const GpuTarget& target, bool timed) {
    return Compiler(segments, target, timed).compile(ops);
}

}  // namespace ficco
