// What streams are told to do: the rows of a plan, turned into few driver calls. Nothing runs here.
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
        copy,    // copies[first]
        words,   // words[first] to [last], one batch
        stores,  // likewise, by a kernel
        record,  // the event of step `first`
        wait,    // for the event of step `first`
        begin,   // of step `first`: take the time
        end,
    };
    Kind kind;
    int lane;  // kInline: the caller's stream
    int first;
    int last;
};

struct GpuCommands {
    std::vector<std::vector<GpuAction>> segments;  // each in submission order
    std::vector<CopyOp> copies;
    std::array<std::vector<WordCommand>, kWindowCopies> words;  // by copy of the call
};

// What rows are compiled for.
struct GpuTarget {
    const GpuWindow& window;
    const GpuWatch& watch;
    int number;  // of the plan, at the watch
    std::uint32_t digest;
    bool stores;  // whether the device has a kernel that does
};

// `timed`: the time is taken before and after each step.
GpuCommands compile(std::span<const Op> ops, int segments, const GpuTarget& target, bool timed);

}  // namespace ficco
