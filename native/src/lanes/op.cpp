// Reads and checks rows of numbers, independent of a group. Nothing runs here.
#include "ficco/op.hpp"

#include <limits>
#include <stdexcept>
#include <string>

#include "ficco/limits.hpp"
#include "row.hpp"

namespace ficco {

namespace {

CopyOp read_copy(const Row& row, const OpLimits& limits) {
    CopyOp copy{};
    const std::int64_t copies = row.in(15, 0, 3, "copies");
    copy.from = {row.index(4, limits.slots, "source slot"), row.size(5, "source row"),
                 row.size(6, "source byte"), static_cast<int>(copies & 1)};
    copy.to = {row.index(7, limits.slots, "destination slot"), row.size(8, "destination row"),
               row.size(9, "destination byte"), static_cast<int>(copies >> 1)};
    copy.rows = row.size(10, "rows");
    copy.row_bytes = row.in(11, 0, copy.rows == 0 ? kMost : kMost / copy.rows, "bytes per row");
    copy.link_from = static_cast<int>(row.in(12, -1, limits.world - 1, "link from"));
    copy.link_to = copy.link_from < 0 ? -1 : row.index(13, limits.world, "link to");
    if (copy.link_from >= 0 && copy.link_from == copy.link_to) {
        row.refuse(13, "is the rank that the link is from; a local copy has -1 in field 12");
    }
    copy.latency_ns = row.size(14, "latency");
    return copy;
}

WordOp read_word(const Row& row, const OpLimits& limits, Op::Kind kind) {
    WordOp word{};
    word.rank = row.index(4, limits.world, "rank of the word");
    word.index = row.index(5, kWordsPerCopy, "word");
    if (kind != Op::Kind::clear) {
        word.value = static_cast<std::uint32_t>(
            row.in(6, 0, std::numeric_limits<std::uint32_t>::max(), "value"));
        word.digest = row.flag(7, "digest");
    }
    if (kind == Op::Kind::raise || kind == Op::Kind::clear || kind == Op::Kind::wait) {
        word.how = static_cast<Raising>(row.in(8, 0, static_cast<int>(Raising::store), "how"));
    }
    word.other_copy = row.flag(15, "other copy") ? 1 : 0;
    return word;
}

}  // namespace

std::vector<Op> read_ops(std::span<const std::int64_t> fields, const OpLimits& limits) {
    if (fields.size() % kOpFields != 0) {
        throw std::invalid_argument("ops are not rows of " + std::to_string(kOpFields) +
                                    " numbers");
    }
    std::vector<Op> ops;
    ops.reserve(fields.size() / kOpFields);
    int segment = 0;
    for (std::size_t number = 0; number < fields.size() / kOpFields; ++number) {
        const Row row("ops", number, fields.subspan(number * kOpFields, kOpFields));
        Op op{};
        op.segment = static_cast<int>(row.in(0, segment, limits.segments - 1, "segment"));
        op.lane = static_cast<int>(row.in(1, kInline, kMaxLanes - 1, "lane"));
        op.kind = static_cast<Op::Kind>(row.in(2, 0, static_cast<int>(Op::Kind::missed), "kind"));
        op.step = row.index(3, limits.steps, "step");
        segment = op.segment;  // never less in the next row
        if (op.kind == Op::Kind::copy) {
            op.copy = read_copy(row, limits);
        } else if (op.kind == Op::Kind::after) {
            op.awaited = row.index(4, limits.steps, "awaited step");
        } else {
            op.word = read_word(row, limits, op.kind);
        }
        ops.push_back(op);
    }
    return ops;
}

std::vector<WindowSlot> read_window_slots(std::span<const std::int64_t> fields,
                                          const OpLimits& limits) {
    if (fields.size() % kWindowSlotFields != 0) {
        throw std::invalid_argument("window_slots are not rows of " +
                                    std::to_string(kWindowSlotFields) + " numbers");
    }
    std::vector<WindowSlot> slots;
    slots.reserve(fields.size() / kWindowSlotFields);
    for (std::size_t number = 0; number < fields.size() / kWindowSlotFields; ++number) {
        const Row row("window_slots", number,
                      fields.subspan(number * kWindowSlotFields, kWindowSlotFields));
        slots.push_back({row.index(0, limits.slots, "slot"), row.index(1, limits.world, "rank"),
                         row.size(2, "offset"), row.size(3, "pitch")});
    }
    return slots;
}

std::int64_t end_of_box(const Place& place, std::int64_t rows, std::int64_t row_bytes,
                        std::int64_t pitch) {
    if (rows == 0 || row_bytes == 0) return 0;
    std::int64_t end = 0;
    // All numbers are at most kMost, so only the product and later sums can overflow.
    if (__builtin_mul_overflow(place.row + rows - 1, pitch, &end) || end > kMost) {
        throw std::invalid_argument("a copy reaches beyond any memory: row " +
                                    std::to_string(place.row + rows - 1) + " at a pitch of " +
                                    std::to_string(pitch) + " bytes");
    }
    return end + place.byte + row_bytes;
}

}  // namespace ficco
