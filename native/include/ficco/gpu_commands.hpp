// Commands for streams: the rows of a plan, compiled into few driver calls. Nothing runs here.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/gpu_watch.hpp"
#include "ficco/gpu_window.hpp"
#include "ficco/op.hpp"

namespace ficco {

struct GpuAction {
    enum class Kind {
        copy,     // copies[first]
        words,    // words[first] to [last], one batch of stream memory operations
        stores,   // likewise, by a kernel
        awaits,   // awaited[first] to [last], by a kernel
        signals,  // signals[first] to [last], one copy of four bytes each
        record,   // the event of step `first`
        wait,     // for the event of step `first`
        begin,    // of step `first`: record the time
        end,
    };
    Kind kind;
    int lane;  // kInline: the caller's stream
    int first;
    int last;
};

// A copy of four bytes, from a constant to a word of a peer.
struct SignalCopy {
    GpuAddress to;
    GpuAddress from;
};

struct GpuCommands {
    std::vector<std::vector<GpuAction>> segments;  // each in submission order
    std::vector<CopyOp> copies;
    std::array<std::vector<WordCommand>, kWindowCopies> words;     // by copy of the call
    std::array<std::vector<AwaitedValue>, kWindowCopies> awaited;  // likewise
    std::vector<int> awaiting;                                     // the step of each of these
    std::array<std::vector<SignalCopy>, kWindowCopies> signals;    // likewise
};

// The target of compiled rows.
struct GpuTarget {
    const GpuWindow& window;
    const GpuWatch& watch;
    int number;  // of the plan, at the watchdog
    std::uint32_t digest;
    Gpu& gpu;
};

// `timed`: whether to record the time before and after each step.
GpuCommands compile(std::span<const Op> ops, int segments, const GpuTarget& target, bool timed);

}  // namespace ficco
