// One row of a bound plan, and reading it from the 16 numbers that Python hands over.
// The numbers are described once, at Program in ficco/_native.pyi. Nothing is run here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ficco {

inline constexpr int kOpFields = 16;
inline constexpr int kInline = -1;  // the lane of rows that the calling thread runs

// A box: where it starts in its slot, and in which copy of the window if the slot is one.
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
    int link_from;  // -1: over no link
    int link_to;
    std::int64_t latency_ns;
};

struct WordOp {
    int rank;
    int index;
    std::uint32_t value;
    bool digest;  // use the call's digest instead of `value`
    int other_copy;
};

struct Op {
    // expect: a kernel that the caller enqueues behind this segment waits for the word.
    // missed: it does, and tells the watch by itself if the word does not come.
    enum class Kind { copy, raise, wait, clear, after, expect, missed };
    Kind kind;
    int segment;
    int lane;
    int step;
    CopyOp copy;  // of a copy
    WordOp word;  // of all others but after
    int awaited;  // of after: the step that must be done

    // Whether what follows in program order may have to wait long for it.
    bool may_block() const noexcept { return kind != Kind::raise && kind != Kind::clear; }
};

// What the numbers may be.
struct OpLimits {
    int world;
    int segments;
    int steps;
    int slots;
};

// Throws std::invalid_argument that names row and field. `fields` is rows x kOpFields.
std::vector<Op> read_ops(std::span<const std::int64_t> fields, const OpLimits& limits);

// A slot that lies in a window.
struct WindowSlot {
    int slot;
    int rank;
    std::int64_t offset;
    std::int64_t pitch;
};

inline constexpr int kWindowSlotFields = 4;

std::vector<WindowSlot> read_window_slots(std::span<const std::int64_t> fields,
                                          const OpLimits& limits);

// Bytes from the start of a slot to behind the last byte of a box, for what memory a row needs.
// Throws std::invalid_argument where that is beyond any memory.
std::int64_t end_of_box(const Place& place, std::int64_t rows, std::int64_t row_bytes,
                        std::int64_t pitch);

}  // namespace ficco
