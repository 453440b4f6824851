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
        copy,     // copies[first]
        words,    // words[first] to [last], one batch of stream memory operations
        stores,   // likewise, by a kernel
        signals,  // signals[first] to [last], a copy of four bytes each
        record,   // the event of step `first`
        wait,     // for the event of step `first`
        begin,    // of step `first`: take the time
        end,
    };
    Kind kind;
    int lane;  // kInline: the caller's stream
    int first;
    int last;
};

// How a word is raised.
//
//     write   by the stream (a memory operation), with others in one driver call
//     copy    by a copy engine: four bytes from a constant, behind what the stream did before
//     store   by one kernel, with others
enum class Raising { write, copy, store };

// The one place that decides it. `writable`: whether the stream may write to the word, which is its
// device's own, or which the driver allows at a peer. `behind_kernels`: whether the stream is the
// caller's, whose commands follow kernels; elsewhere a kernel that stores would have to find room
// beside one that waits for the word. `stores`: whether the device has a kernel that stores.
constexpr Raising raising(bool writable, bool behind_kernels, bool stores) {
    if (writable) return Raising::write;
    return behind_kernels && stores ? Raising::store : Raising::copy;
}

// A copy of four bytes, from a constant to a word of a peer.
struct SignalCopy {
    GpuAddress to;
    GpuAddress from;
};

struct GpuCommands {
    std::vector<std::vector<GpuAction>> segments;  // each in submission order
    std::vector<CopyOp> copies;
    std::array<std::vector<WordCommand>, kWindowCopies> words;   // by copy of the call
    std::array<std::vector<SignalCopy>, kWindowCopies> signals;  // likewise
};

// What rows are compiled for.
struct GpuTarget {
    const GpuWindow& window;
    const GpuWatch& watch;
    int number;  // of the plan, at the watch
    std::uint32_t digest;
    Gpu& gpu;
};

// `timed`: the time is taken before and after each step.
GpuCommands compile(std::span<const Op> ops, int segments, const GpuTarget& target, bool timed);

}  // namespace ficco
