// Writes rows of programs for tests, and binds and calls them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ficco/group.hpp"
#include "ficco/program.hpp"

namespace ficco::test {

// Loose, for a busy machine, but far below the timeouts in the tests.
constexpr std::int64_t kSoonNs = 5'000'000'000;

// Places of words, as in ficco/plan/__init__.py.
constexpr int data_word(int writer, int chunk) { return writer * kMaxChunks + chunk; }
constexpr int entered_word(int writer) { return kMaxWorld * kMaxChunks + writer; }
constexpr int free_word(int reader) { return kFreeWords + reader; }

// A box in a slot.
struct At {
    std::int64_t slot;
    std::int64_t row = 0;
    std::int64_t byte = 0;
};

struct Link {
    std::int64_t from = -1;
    std::int64_t to = -1;
    std::int64_t latency_ns = 0;
};

class Rows {
  public:
    // For all later rows.
    Rows& on(int segment, int lane) {
        segment_ = segment;
        lane_ = lane;
        return *this;
    }
    Rows& step(int index) {
        step_ = index;
        return *this;
    }
    Rows& copy(At from, At to, std::int64_t rows, std::int64_t row_bytes, Link link = {},
               std::int64_t copies = 0) {
        return row({segment_, lane_, 0, step_, from.slot, from.row, from.byte, to.slot, to.row,
                    to.byte, rows, row_bytes, link.from, link.to, link.latency_ns, copies});
    }
    // How later words are raised, cleared and waited for.
    Rows& by(Raising how) {
        how_ = how;
        return *this;
    }
    Rows& raise(int rank, int word, std::int64_t value = 1, bool digest = false,
                int other_copy = 0) {
        return word_row(1, rank, word, value, digest, other_copy);
    }
    Rows& wait(int rank, int word, std::int64_t value = 1, bool digest = false,
               int other_copy = 0) {
        return word_row(2, rank, word, value, digest, other_copy);
    }
    Rows& clear(int rank, int word, int other_copy = 0) {
        return word_row(3, rank, word, 0, false, other_copy);
    }
    Rows& expect(int rank, int word, std::int64_t value = 1) {
        return word_row(5, rank, word, value, false, 0);
    }
    Rows& after(int step) {
        return row({segment_, lane_, 4, step_, step, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
    }

    std::span<const std::int64_t> fields() const { return fields_; }

  private:
    Rows& word_row(int kind, int rank, int word, std::int64_t value, bool digest, int other_copy) {
        const std::int64_t how = kind >= 1 && kind <= 3 ? static_cast<std::int64_t>(how_) : 0;
        return row({segment_, lane_, kind, step_, rank, word, value, digest ? 1 : 0, how, 0, 0, 0,
                    0, 0, 0, other_copy});
    }
    Rows& row(std::initializer_list<std::int64_t> fields) {
        for (const std::int64_t field : fields) fields_.push_back(field);
        return *this;
    }

    int segment_ = 0;
    int lane_ = 0;
    int step_ = 0;
    Raising how_ = Raising::write;
    std::vector<std::int64_t> fields_;
};

struct Sizes {
    int segments = 1;
    int steps = 1;
    int slots = 0;
};

inline std::unique_ptr<Program> bound(std::shared_ptr<Group> group, int rank, const Rows& rows,
                                      const Sizes& sizes,
                                      const std::vector<std::int64_t>& window_slots = {}) {
    return std::make_unique<Program>(
        std::move(group),
        Binding{rank, rows.fields(), window_slots, sizes.segments, sizes.steps, sizes.slots});
}

// The slots of a caller.
struct Slots {
    explicit Slots(std::size_t count) : addresses(count), pitches(count) {}
    void set(std::size_t slot, const void* data, std::int64_t pitch) {
        addresses[slot] = reinterpret_cast<std::uintptr_t>(data);
        pitches[slot] = pitch;
    }
    std::vector<std::uint64_t> addresses;
    std::vector<std::int64_t> pitches;
};

// One call of all segments. Returns false if the group has failed.
inline bool call(Program& program, int segments, int copy = 0, std::uint32_t digest = 0,
                 const Slots& slots = Slots(0)) {
    program.start(copy, digest, slots.addresses, slots.pitches);
    for (int segment = 0; segment < segments; ++segment) program.submit(segment);
    return program.finish();
}

}  // namespace ficco::test
