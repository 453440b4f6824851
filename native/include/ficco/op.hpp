// One row of a bound plan, read from the 16 numbers that Python passes. Program in
// ficco/_native.pyi describes the numbers. Nothing runs here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ficco {

inline constexpr int kOpFields = 16;
inline constexpr int kInline = -1;  // the lane of rows that the calling thread runs

// The start of a box in its slot, and the window copy if the slot is in a window.
struct Place {
    int slot;
    std::int64_t row;
    std::int64_t byte;  // in the row
    int other_copy;     // 1: not the copy of the call
};

struct CopyOp {
    Place from;
    Place to;
    std::int64_t rows;
    std::int64_t row_bytes;
    int link_from;  // -1: the copy uses no link
    int link_to;
    std::int64_t latency_ns;
};

// Ways to raise or clear a word, or to wait for one.
//
//     write   by the stream (a memory operation), several words in one driver call
//     copy    by a copy engine: four bytes from a constant, after the stream's earlier work; raises
//     store   by a kernel on the caller's stream, all words of a step in one launch
enum class Raising { write, copy, store };

struct WordOp {
    int rank;
    int index;
    std::uint32_t value;
    bool digest;  // use the call's digest instead of `value`
    int other_copy;
    Raising how;  // for raise, clear and wait
};

struct Op {
    // expect: a kernel that the caller enqueues after this segment waits for the word.
    // missed: likewise, and the kernel reports to the watchdog if the word does not arrive.
    enum class Kind { copy, raise, wait, clear, after, expect, missed };
    Kind kind;
    int segment;
    int lane;
    int step;
    CopyOp copy;  // for copy
    WordOp word;  // for all other kinds except after
    int awaited;  // for after: the step that must be done

    // Whether later rows in program order may have to wait long for it.
    bool may_block() const noexcept { return kind != Kind::raise && kind != Kind::clear; }
};

// The ranges of the numbers.
struct OpLimits {
    int world;
    int segments;
    int steps;
    int slots;
};

// Throws std::invalid_argument that names row and field. `fields` is rows x kOpFields.
std::vector<Op> read_ops(std::span<const std::int64_t> fields, const OpLimits& limits);

// A slot in a window.
struct WindowSlot {
    int slot;
    int rank;
    std::int64_t offset;
    std::int64_t pitch;
};

inline constexpr int kWindowSlotFields = 4;

std::vector<WindowSlot> read_window_slots(std::span<const std::int64_t> fields,
                                          const OpLimits& limits);

// Bytes from the start of a slot to the end of a box: the memory that a row needs. Throws
// std::invalid_argument if that exceeds any possible memory.
std::int64_t end_of_box(const Place& place, std::int64_t rows, std::int64_t row_bytes,
                        std::int64_t pitch);

}  // namespace ficco
