// A bound plan of one rank on a GPU: its rows turned once into commands for streams, then submitted
// segment by segment. Between segments the caller enqueues compute on its own stream.
//
//   caller's stream   fork | segment 0 | gemm | segment 1 | gemm | ... | join
//   lanes' streams         | copies and words of each segment          |
//
// Compute whose kernels are described to the program is enqueued by the program itself; where all
// is, one call does everything.
//
// Rows are submitted in the order of the plan, so that it is right on one shared hardware queue,
// too. What marks the end of a kernel that expects words is submitted behind the other lanes' rows
// that follow: such a queue would hold them until the kernel ends, which may wait for peers that
// wait for them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ficco/gpu_commands.hpp"
#include "ficco/gpu_launch.hpp"
#include "ficco/gpu_rank.hpp"
#include "ficco/gpu_tensor_maps.hpp"
#include "ficco/gpu_window.hpp"
#include "ficco/op.hpp"
#include "ficco/program.hpp"

namespace ficco {

// When a row ran on the device, CLOCK_MONOTONIC ns; 0 where nothing ran.
struct GpuTimes {
    std::int64_t start_ns;
    std::int64_t end_ns;
};

// A compute step, as it stands behind a segment.
struct GpuWork {
    int step;  // whose time is taken
    int mark;  // the step that others may come after then, or -1
    std::vector<GpuLaunch> launches;
};

// One thread at a time calls. Arguments out of range throw std::invalid_argument, calls out of
// season std::runtime_error, what the driver refuses GpuError.
class GpuProgram {
  public:
    // `digest` goes into rows that ask for it.
    GpuProgram(std::shared_ptr<GpuRank> rank, std::shared_ptr<const GpuWindow> window,
               const Binding& binding, std::uint32_t digest);
    ~GpuProgram();
    GpuProgram(const GpuProgram&) = delete;
    GpuProgram& operator=(const GpuProgram&) = delete;

    // Describes the compute between a segment and the next; again: in place of the earlier. Kernels
    // are loaded, which may wait for the device. Not while a call runs.
    void set_launches(int segment, int step, int mark, std::span<const LaunchBinding> launches);
    // Whether launches are kernels for such slots.
    bool fits(std::span<const std::uint64_t> addresses,
              std::span<const std::int64_t> pitches) const;
    // Start, all segments with their launches, and finish. After an error: abandon.
    void call(int copy, GpuStream stream, bool traced, std::span<const std::uint64_t> addresses,
              std::span<const std::int64_t> pitches);
    // The same without times, where nothing needs a second look. False, and nothing is enqueued: a
    // segment has no launches, or they are not for such matrices; the group has failed, or a kernel
    // has told the watch so; the stream is captured.
    bool call_prepared(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
                       std::span<const std::int64_t> pitches);
    // Whether it would, as far as is known now.
    bool can_call_prepared(GpuStream stream, std::span<const std::uint64_t> addresses,
                           std::span<const std::int64_t> pitches) const;

    // Begins a call on the caller's stream. A traced call takes times of every row, unless it is
    // captured into a graph. Addresses and pitches are given per slot; those of windows are not
    // looked at.
    void start(int copy, GpuStream stream, bool traced, std::span<const std::uint64_t> addresses,
               std::span<const std::int64_t> pitches);
    void submit(int segment);
    // Enqueues the launches of a segment behind it, stamps and mark included.
    void launch(int segment);
    // The caller has enqueued a step that others may come after. It, and the end of a step, may be
    // submitted later, before anything that needs it.
    void mark(int step);
    void stamp(int step, bool ended);  // the caller is about to enqueue a step, or has
    // Joins all lanes into the caller's stream. Throws GpuError where a capture has lost copies.
    void finish();
    // Instead of finish after an error: the group has failed.
    void abandon() noexcept;

    // Of the last traced call, by step; waits for its end.
    std::vector<GpuTimes> times();
    int copies() const noexcept { return static_cast<int>(commands_.copies.size()); }
    // Whether a graph holds a call of it, which may be replayed for as long as the rank lives.
    bool captured() const noexcept { return captured_; }

  private:
    GpuTarget target() const;
    void check_slots(std::span<const std::uint64_t> addresses,
                     std::span<const std::int64_t> pitches) const;
    void check_launch(const GpuLaunch& launch) const;
    LaunchPlaces places(int copy) const;
    bool has_all_launches() const;
    void begin(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
               std::span<const std::int64_t> pitches);
    void submit_all();
    bool expects() const;  // whether the kernel behind the last segment does
    void record_step(int step);
    void record_time(int step, bool ended);
    void settle();  // submit what was left for later
    void run(const GpuAction& action);
    void run_copy(const CopyOp& copy, GpuStream stream);
    void fork();
    void join();
    void tell_watch_of_end();
    void end_call() noexcept;
    GpuStream stream_of(int lane) const;
    GpuEvent made(GpuEvent& event, bool timed = false);

    const std::shared_ptr<GpuRank> rank_;
    const std::shared_ptr<const GpuWindow> window_;
    const std::uint32_t digest_;
    int number_ = 0;  // at the watch

    // Fixed by the binding.
    std::vector<Op> ops_;
    GpuCommands commands_;
    std::optional<GpuCommands> traced_commands_;  // made when first asked for
    std::vector<int> lanes_;                      // that the plan uses beside the caller's stream
    std::vector<GpuStream> streams_;              // by lane
    std::vector<WindowSlot> window_slots_;
    std::vector<bool> slot_is_window_;
    std::vector<bool> slot_is_given_;   // by the caller
    std::vector<bool> slot_is_copied_;  // its address must not be 0
    std::vector<bool> expects_;         // by segment: whether a kernel behind it expects words

    // Compute that the program enqueues itself, by segment.
    std::vector<std::optional<GpuWork>> works_;
    GpuTensorMaps maps_;

    // Events, made when first used.
    std::vector<GpuEvent> step_events_;
    std::vector<std::array<GpuEvent, 2>> time_events_;  // by step: begin, end
    std::vector<GpuEvent> joins_;                       // by entry of lanes_
    GpuEvent fork_ = nullptr;
    GpuEvent now_ = nullptr;

    // Of the present or last call.
    bool running_ = false;
    bool traced_ = false;
    bool capturing_ = false;
    bool captured_ = false;  // ever: a graph may replay it for as long as the rank lives
    int copy_ = 0;
    int next_segment_ = 0;
    GpuStream caller_ = nullptr;
    CapturedNodes nodes_before_{};                              // in the graph
    CapturedNodes submitted_{};                                 // by this call
    std::vector<std::array<GpuAddress, kWindowCopies>> bases_;  // by slot
    std::vector<std::int64_t> pitches_;
    std::vector<std::array<bool, 2>> stamped_;  // by step
    std::optional<int> unmarked_;               // a step whose mark is left for later
    std::optional<int> unstamped_;              // likewise its end
};

}  // namespace ficco
