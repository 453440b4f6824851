// A bound plan of one rank on a GPU: its rows are compiled once into commands for streams, then
// submitted segment by segment. Between segments the caller enqueues compute on its own stream.
//
//   caller's stream   fork | segment 0 | gemm | segment 1 | gemm | ... | join
//   lanes' streams         | copies and words of each segment          |
//
// The program itself enqueues compute whose kernels are described to it; if all are, one call does
// everything.
//
// Rows are submitted in the order of the plan, which is also correct on one shared hardware queue.
// The commands that mark the end of a kernel that expects words are submitted after the later rows
// of other lanes. Otherwise such a queue would hold these rows until the kernel ends, and the
// kernel may wait for peers that wait for the rows.
#pragma once

#include <array>
#include <cstdint>
#include <map>
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

// When a row ran on the device, CLOCK_MONOTONIC ns; 0 if it did not run.
struct GpuTimes {
    std::int64_t start_ns;
    std::int64_t end_ns;
};

// The compute step after a segment.
struct GpuWork {
    int step;  // whose time is recorded
    int mark;  // the step to mark as enqueued for dependent steps, or -1
    std::vector<GpuLaunch> launches;
};

// Only one thread at a time may call it. It throws std::invalid_argument for arguments out of
// range, std::runtime_error for calls in a wrong state, and GpuError for failed driver calls.
class GpuProgram {
  public:
    // `digest` is for rows that use it.
    GpuProgram(std::shared_ptr<GpuRank> rank, std::shared_ptr<const GpuWindow> window,
               const Binding& binding, std::uint32_t digest);
    ~GpuProgram();
    GpuProgram(const GpuProgram&) = delete;
    GpuProgram& operator=(const GpuProgram&) = delete;

    // Describes the compute between a segment and the next, and replaces an earlier description.
    // Loads kernels, which may wait for the device. Not allowed while a call runs.
    void set_launches(int segment, int step, int mark, std::span<const LaunchBinding> launches);
    // Whether the launches fit such slots.
    bool fits(std::span<const std::uint64_t> addresses,
              std::span<const std::int64_t> pitches) const;
    // Starts, submits all segments with their launches, and finishes. Call abandon after an error.
    void call(int copy, GpuStream stream, bool traced, std::span<const std::uint64_t> addresses,
              std::span<const std::int64_t> pitches);
    // The same without times, if no slow path is needed. Returns false and enqueues nothing if a
    // segment has no launches or they do not fit the matrices; if the group has failed, or a kernel
    // has reported a failure to the watchdog; or if the stream is being captured. `followed`: the
    // stream is behind the last call already.
    bool call_prepared(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
                       std::span<const std::int64_t> pitches, bool followed = false);
    // Begins such a call. The caller then submits the segments one by one, and calls finish. Unlike
    // call_prepared, it allows segments without launches.
    bool start_prepared(int copy, GpuStream stream, std::span<const std::uint64_t> addresses,
                        std::span<const std::int64_t> pitches, bool followed = false);
    // Puts the stream behind the last call, for work that the caller enqueues before call_prepared.
    // Returns false, and enqueues nothing, if call_prepared would return false whatever the
    // matrices.
    bool follow(GpuStream stream);
    // For such work without a call behind it: later calls on any stream wait for the stream's end.
    void end(GpuStream stream);

    // Begins a call on the caller's stream. A traced call records times of every row, unless it is
    // captured into a graph. There is one address and pitch per slot; those of windows are ignored.
    void start(int copy, GpuStream stream, bool traced, std::span<const std::uint64_t> addresses,
               std::span<const std::int64_t> pitches);
    void submit(int segment);
    // Enqueues the launches after a segment, including stamps and mark.
    void launch(int segment);
    // Marks a step as enqueued by the caller, for dependent steps. The mark, and the end stamp of a
    // step, may be submitted later, but before any command that needs it.
    void mark(int step);
    void stamp(int step, bool ended);  // before or after the caller enqueues a step
    // Joins all lanes into the caller's stream. Throws GpuError if a capture has lost copies.
    void finish();
    // Replaces finish after an error: the group has failed.
    void abandon() noexcept;

    // Times of the last traced call, by step; waits for its end.
    std::vector<GpuTimes> times();
    int copies() const noexcept { return static_cast<int>(commands_.copies.size()); }
    // Whether a graph has captured a call; it may be replayed as long as the rank lives.
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
    bool is_clear(GpuStream stream) const;  // nothing has failed, and no graph captures
    void submit_all();
    bool expects() const;  // whether the kernel after the last segment expects words
    void record_step(int step);
    void record_time(int step, bool ended);
    void settle();  // submits a delayed mark and end stamp
    void run(const GpuAction& action);
    void await(int step, std::span<const AwaitedValue> words);
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
    int number_ = 0;  // at the watchdog
    // Steps that a kernel waits for, and their own numbers there: while such a kernel runs, earlier
    // words of the call may have been cleared.
    std::map<int, int> awaiting_;

    // Fixed by the binding.
    std::vector<Op> ops_;
    GpuCommands commands_;
    std::optional<GpuCommands> traced_commands_;  // compiled at the first traced call
    std::vector<int> lanes_;                      // lanes of the plan except the caller's stream
    std::vector<GpuStream> streams_;              // by lane
    std::vector<WindowSlot> window_slots_;
    std::vector<bool> slot_is_window_;
    std::vector<bool> slot_is_given_;   // by the caller
    std::vector<bool> slot_is_copied_;  // its address must not be 0
    std::vector<bool> expects_;         // by segment: whether a kernel after it expects words

    // Compute that the program enqueues itself, by segment.
    std::vector<std::optional<GpuWork>> works_;
    GpuTensorMaps maps_;

    // Events, created at the first use.
    std::vector<GpuEvent> step_events_;
    std::vector<std::array<GpuEvent, 2>> time_events_;  // by step: begin, end
    std::vector<GpuEvent> joins_;                       // by entry of lanes_
    GpuEvent fork_ = nullptr;
    GpuEvent now_ = nullptr;

    // Of the present or last call.
    bool running_ = false;
    bool traced_ = false;
    bool capturing_ = false;
    bool captured_ = false;  // at any time: a graph may replay it as long as the rank lives
    int copy_ = 0;
    int next_segment_ = 0;
    GpuStream caller_ = nullptr;
    CapturedNodes nodes_before_{};                              // in the graph
    CapturedNodes submitted_{};                                 // by this call
    std::vector<std::array<GpuAddress, kWindowCopies>> bases_;  // by slot
    std::vector<std::int64_t> pitches_;
    std::vector<std::array<bool, 2>> stamped_;  // by step
    std::optional<int> unmarked_;               // a step whose mark is delayed
    std::optional<int> unstamped_;              // a step whose end stamp is delayed
};

}  // namespace ficco
