// Calls of a program on a GPU. The binding is in gpu_binding.cpp.
#include "ficco/gpu_program.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "ficco/clock.hpp"

namespace ficco {

namespace {

void check_captured(std::size_t found, std::size_t submitted, const char* what) {
    if (found < submitted) {
        throw GpuError("the graph has " + std::to_string(found) + " " + what + " of the " +
                       std::to_string(submitted) + " that were submitted; do not use it");
    }
}

}  // namespace

void GpuProgram::check_slots(std::span<const std::uint64_t> addresses,
                             std::span<const std::int64_t> pitches) const {
    if (addresses.size() != bases_.size() || pitches.size() != bases_.size()) {
        throw std::invalid_argument("the program has " + std::to_string(bases_.size()) +
                                    " slots, and was given " + std::to_string(addresses.size()) +
                                    " addresses and " + std::to_string(pitches.size()) +
                                    " pitches");
    }
}

void GpuProgram::call(int copy, GpuStream stream, bool traced,
                      std::span<const std::uint64_t> addresses,
                      std::span<const std::int64_t> pitches) {
    for (std::size_t segment = 0; segment + 1 < works_.size(); ++segment) {
        if (!works_[segment]) {
            throw std::runtime_error("segment " + std::to_string(segment) +
                                     " has no launches; set them, or submit segments one by one");
        }
    }
    if (!fits(addresses, pitches)) {
        throw std::invalid_argument(
            "the launches are not for matrices of these addresses and pitches; set others");
    }
    const Gpu::Current current(rank_->gpu());
    start(copy, stream, traced, addresses, pitches);
    submit_all();
}

bool GpuProgram::is_clear(GpuStream stream) const {
    if (rank_->group().failed() || rank_->watch().missed() != 0) return false;
    return !rank_->gpu().capturing(stream);
}

bool GpuProgram::follow(GpuStream stream) {
    const Gpu::Current current(rank_->gpu());
    if (!has_all_launches() || !is_clear(stream)) return false;
    rank_->after_last_call(stream);
    return true;
}

void GpuProgram::end(GpuStream stream) {
    const Gpu::Current current(rank_->gpu());
    rank_->ended(stream);
}

bool GpuProgram::call_prepared(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
                               std::span<const std::int64_t> pitches, bool followed) {
    const Gpu::Current current(rank_->gpu());
    if (!has_all_launches() || !start_prepared(copy, stream, addresses, pitches, followed)) {
        return false;
    }
    submit_all();
    return true;
}

bool GpuProgram::start_prepared(int copy, GpuStream stream,
                                std::span<const std::uint64_t> addresses,
                                std::span<const std::int64_t> pitches, bool followed) {
    const Gpu::Current current(rank_->gpu());
    if (!is_clear(stream) || !fits(addresses, pitches)) return false;
    begin(copy, stream, addresses, pitches);
    capturing_ = traced_ = false;
    if (!followed) rank_->after_last_call(stream);
    fork();
    return true;
}

bool GpuProgram::has_all_launches() const {
    return std::all_of(works_.begin(), works_.end() - 1,
                       [](const auto& work) { return work.has_value(); });
}

void GpuProgram::submit_all() {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    const int last = static_cast<int>(works_.size()) - 1;
    for (int segment = 0; segment < last; ++segment) {
        submit(segment);
        launch(segment);
    }
    submit(last);
    finish();
}

void GpuProgram::begin(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
                       std::span<const std::int64_t> pitches) {
    rank_->group().check_copy(copy);
    if (running_) throw std::runtime_error("the program runs already; finish it first");
    check_slots(addresses, pitches);
    for (std::size_t slot = 0; slot < bases_.size(); ++slot) {
        if (slot_is_copied_[slot] && addresses[slot] == 0) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " has no address");
        }
        bases_[slot] = {addresses[slot], addresses[slot]};
        pitches_[slot] = pitches[slot];
    }
    for (const WindowSlot& slot : window_slots_) {
        const auto index = static_cast<std::size_t>(slot.slot);
        const auto offset = static_cast<GpuAddress>(slot.offset);
        bases_[index] = {window_->data(slot.rank, copy) + offset,
                         window_->data(slot.rank, copy ^ 1) + offset};
        pitches_[index] = slot.pitch;
    }
    rank_->group().enter(rank_->rank(), digest_, 0);
    running_ = true;
    copy_ = copy;
    next_segment_ = 0;
    caller_ = stream;
    submitted_ = {};
    unmarked_.reset();
    unstamped_.reset();
}

void GpuProgram::start(int copy, GpuStream stream, bool traced,
                       std::span<const std::uint64_t> addresses,
                       std::span<const std::int64_t> pitches) {
    begin(copy, stream, addresses, pitches);
    Gpu& gpu = rank_->gpu();
    const Gpu::Current current(gpu);
    capturing_ = gpu.capturing(stream);
    captured_ |= capturing_;
    if (capturing_) {
        rank_->group().captured();
        nodes_before_ = gpu.captured_nodes(stream, Gpu::kAllKnown);
    }
    traced_ = traced && !capturing_;
    if (traced_) {
        if (!traced_commands_) {
            traced_commands_ =
                compile(ops_, static_cast<int>(commands_.segments.size()), target(), true);
        }
        stamped_.assign(stamped_.size(), {false, false});
    }
    if (capturing_) {
        rank_->after_last_call(stream, nodes_before_.capture);
    } else {
        rank_->after_last_call(stream);
    }
    fork();
}

void GpuProgram::submit(int segment) {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    const auto& commands = traced_ ? *traced_commands_ : commands_;
    if (segment < next_segment_ || segment >= static_cast<int>(commands.segments.size())) {
        throw std::invalid_argument("segment is " + std::to_string(segment) + ", not " +
                                    std::to_string(next_segment_) + " to " +
                                    std::to_string(commands.segments.size() - 1));
    }
    next_segment_ = segment + 1;
    const Gpu::Current current(rank_->gpu());
    for (const GpuAction& action : commands.segments[static_cast<std::size_t>(segment)]) {
        if (action.lane == kInline || action.kind == GpuAction::Kind::wait) settle();
        run(action);
    }
    settle();
}

void GpuProgram::launch(int segment) {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    if (segment != next_segment_ - 1) {
        throw std::invalid_argument("segment is " + std::to_string(segment) +
                                    ", and the last one submitted " +
                                    std::to_string(next_segment_ - 1));
    }
    auto& work = works_[static_cast<std::size_t>(segment)];
    if (!work) {
        throw std::invalid_argument("segment " + std::to_string(segment) + " has no launches");
    }
    Gpu& gpu = rank_->gpu();
    const Gpu::Current current(gpu);
    const LaunchPlaces now = places(copy_);
    stamp(work->step, false);
    for (GpuLaunch& launch : work->launches) {
        launch.run(gpu, now, maps_, caller_);
        ++submitted_.kernels;
    }
    stamp(work->step, true);
    if (work->mark >= 0) mark(work->mark);
}

void GpuProgram::run(const GpuAction& action) {
    Gpu& gpu = rank_->gpu();
    const GpuStream stream = stream_of(action.lane);
    const auto& commands = traced_ ? *traced_commands_ : commands_;
    const auto first = static_cast<std::size_t>(action.first);
    switch (action.kind) {
        case GpuAction::Kind::wait:
            gpu.wait(stream, made(step_events_[first]));
            return;
        case GpuAction::Kind::record:
            gpu.record(made(step_events_[first]), stream);
            return;
        case GpuAction::Kind::begin:
        case GpuAction::Kind::end: {
            const auto which = static_cast<std::size_t>(action.kind == GpuAction::Kind::end);
            gpu.record(made(time_events_[first][which], true), stream);
            stamped_[first][which] = true;
            return;
        }
        case GpuAction::Kind::copy:
            run_copy(commands.copies[first], stream);
            return;
        case GpuAction::Kind::signals:
            for (int i = action.first; i < action.last; ++i) {
                const SignalCopy& signal =
                    commands.signals[static_cast<std::size_t>(copy_)][static_cast<std::size_t>(i)];
                constexpr auto kBytes = sizeof(std::uint32_t);
                gpu.copy({signal.to, kBytes, signal.from, kBytes, 1, kBytes}, stream);
                ++submitted_.copies;
            }
            return;
        case GpuAction::Kind::awaits:
            await(commands.awaiting[first],
                  std::span(commands.awaited[static_cast<std::size_t>(copy_)])
                      .subspan(first, static_cast<std::size_t>(action.last - action.first)));
            return;
        case GpuAction::Kind::words:
        case GpuAction::Kind::stores: {
            const auto words =
                std::span(commands.words[static_cast<std::size_t>(copy_)])
                    .subspan(first, static_cast<std::size_t>(action.last - action.first));
            if (action.kind == GpuAction::Kind::words) {
                gpu.words(words, stream);
            } else {
                gpu.store(words, stream);
                ++submitted_.kernels;
            }
            return;
        }
    }
}

// The watchdog finds that a wait lasts too long, and stops it. The kernel's own limit is for a
// device that does not do what the watchdog asks.
void GpuProgram::await(int step, std::span<const AwaitedValue> words) {
    constexpr double kLimits = 10.0;  // time limits of the group: peers may prepare kernels
    GpuWatch& watch = rank_->watch();
    const int rank = rank_->rank();
    const double limit_s = kLimits * rank_->group().timeout_s() + GpuWatch::kAnswersWithinS;
    rank_->gpu().await({.words = words,
                        .stop = watch.stop_word(),
                        .lane = watch.lane_word(kInline),
                        .mark = GpuWatch::mark_of(awaiting_.at(step), copy_),
                        .missed = watch.missed_word(),
                        .limit_ns = static_cast<std::uint64_t>(1e9 * limit_s),
                        .data = {window_->data(rank, 0), window_->data(rank, 1)},
                        .data_bytes = window_->data_bytes()},
                       caller_);
    ++submitted_.kernels;
}

void GpuProgram::run_copy(const CopyOp& copy, GpuStream stream) {
    const auto address = [&](const Place& place) {
        const auto slot = static_cast<std::size_t>(place.slot);
        return bases_[slot][static_cast<std::size_t>(place.other_copy)] +
               static_cast<GpuAddress>(place.row * pitches_[slot] + place.byte);
    };
    if (copy.rows == 0 || copy.row_bytes == 0) return;
    rank_->gpu().copy(
        {address(copy.to), pitches_[static_cast<std::size_t>(copy.to.slot)], address(copy.from),
         pitches_[static_cast<std::size_t>(copy.from.slot)], copy.rows, copy.row_bytes},
        stream);
    ++submitted_.copies;
}

void GpuProgram::mark(int step) {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    if (expects()) {
        unmarked_ = step;
    } else {
        record_step(step);
    }
}

void GpuProgram::stamp(int step, bool ended) {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    if (!traced_) return;
    if (ended && expects()) {
        unstamped_ = step;
    } else {
        record_time(step, ended);
    }
}

bool GpuProgram::expects() const {
    return next_segment_ > 0 && expects_[static_cast<std::size_t>(next_segment_ - 1)];
}

void GpuProgram::record_step(int step) {
    const Gpu::Current current(rank_->gpu());
    rank_->gpu().record(made(step_events_.at(static_cast<std::size_t>(step))), caller_);
}

void GpuProgram::record_time(int step, bool ended) {
    const Gpu::Current current(rank_->gpu());
    const auto which = static_cast<std::size_t>(ended);
    rank_->gpu().record(made(time_events_.at(static_cast<std::size_t>(step))[which], true),
                        caller_);
    stamped_[static_cast<std::size_t>(step)][which] = true;
}

void GpuProgram::settle() {
    if (unstamped_) record_time(*unstamped_, true);
    if (unmarked_) record_step(*unmarked_);
    unstamped_.reset();
    unmarked_.reset();
}

void GpuProgram::finish() {
    if (!running_) throw std::runtime_error("no call runs; start one first");
    Gpu& gpu = rank_->gpu();
    const Gpu::Current current(gpu);
    join();
    if (capturing_) {
        const CapturedNodes added = gpu.captured_nodes(caller_, nodes_before_.total);
        check_captured(added.copies, submitted_.copies, "copies");
        check_captured(added.kernels, submitted_.kernels, "kernels");
        rank_->ended(caller_, added.capture);
    } else {
        rank_->ended(caller_);
    }
    end_call();
}

void GpuProgram::abandon() noexcept {
    if (!running_) return;
    rank_->group().fail({rank_->rank(), -1, -1, -1, Failure::Kind::stopped, 0.0, 0, 0});
    try {
        const Gpu::Current current(rank_->gpu());
        join();  // so that a capture can be ended
        if (!capturing_) {
            tell_watch_of_end();
            rank_->ended(caller_);
        }
    } catch (const std::exception&) {
        // the first error is more informative
    }
    end_call();
}

// Submitted commands may set lanes' words that no later command clears.
void GpuProgram::tell_watch_of_end() {
    std::vector<WordCommand> ended;
    const auto add = [&](int lane) {
        ended.push_back({WordCommand::Kind::write, rank_->watch().lane_word(lane), 0U});
    };
    add(kInline);
    for (const int lane : lanes_) add(lane);
    rank_->gpu().words(ended, caller_);
}

void GpuProgram::end_call() noexcept {
    running_ = false;
    rank_->group().leave();
}

void GpuProgram::fork() {
    if (lanes_.empty()) return;
    Gpu& gpu = rank_->gpu();
    gpu.record(made(fork_), caller_);
    for (const int lane : lanes_) gpu.wait(stream_of(lane), fork_);
}

void GpuProgram::join() {
    Gpu& gpu = rank_->gpu();
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        gpu.record(made(joins_[i]), stream_of(lanes_[i]));
        gpu.wait(caller_, joins_[i]);
    }
}

std::vector<GpuTimes> GpuProgram::times() {
    std::vector<GpuTimes> times(stamped_.size(), GpuTimes{0, 0});
    if (!traced_ || running_) return times;
    Gpu& gpu = rank_->gpu();
    const Gpu::Current current(gpu);
    gpu.record(made(now_, true), caller_);
    gpu.synchronize(now_);
    const std::int64_t now = now_ns();
    const auto at = [&](GpuEvent event) {
        return now - static_cast<std::int64_t>(1e3 * gpu.elapsed_us(event, now_));
    };
    for (std::size_t step = 0; step < times.size(); ++step) {
        if (stamped_[step][0] && stamped_[step][1]) {
            times[step] = {at(time_events_[step][0]), at(time_events_[step][1])};
        }
    }
    return times;
}

GpuStream GpuProgram::stream_of(int lane) const {
    return lane == kInline ? caller_ : streams_[static_cast<std::size_t>(lane)];
}

GpuEvent GpuProgram::made(GpuEvent& event, bool timed) {
    if (event == nullptr) event = rank_->gpu().new_event(timed);
    return event;
}

}  // namespace ficco
