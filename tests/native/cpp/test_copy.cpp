// Copies move exactly the bytes of their box, of any size and pitch, between user memory and
// windows.
#include <random>
#include <vector>

#include "check.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

std::vector<std::uint8_t> noise(std::size_t bytes, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> data(bytes);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
    return data;
}

}  // namespace

TEST(copy_boxes_of_odd_sizes) {
    const auto group = std::make_shared<Group>(1, 10.0, nullptr);
    std::mt19937 random(1);
    const auto up_to = [&random](std::int64_t most) {
        return std::uniform_int_distribution<std::int64_t>(0, most)(random);
    };
    for (unsigned round = 0; round < 300; ++round) {
        const std::int64_t rows = up_to(9);
        const std::int64_t row_bytes = up_to(round % 3 == 0 ? 5000 : 37);
        const At from{0, up_to(3), up_to(5)};
        const At to{1, up_to(3), up_to(5)};
        const bool dense = round % 4 == 0;  // one piece: both pitches are the row
        const std::int64_t from_pitch = dense ? row_bytes : from.byte + row_bytes + up_to(9);
        const std::int64_t to_pitch = dense ? row_bytes : to.byte + row_bytes + up_to(9);
        const auto bytes = [&](const At& at, std::int64_t pitch) {
            return static_cast<std::size_t>((at.row + rows) * pitch + at.byte + row_bytes);
        };
        const auto source = noise(bytes(from, from_pitch), round);
        auto target = noise(bytes(to, to_pitch), round + 1000);
        auto expected = target;
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t byte = 0; byte < row_bytes; ++byte) {
                expected[static_cast<std::size_t>((to.row + row) * to_pitch + to.byte + byte)] =
                    source[static_cast<std::size_t>((from.row + row) * from_pitch + from.byte +
                                                    byte)];
            }
        }
        Slots slots(2);
        slots.set(0, source.data(), from_pitch);
        slots.set(1, target.data(), to_pitch);
        const auto program = bound(
            group, 0, Rows().on(0, static_cast<int>(round % 3) - 1).copy(from, to, rows, row_bytes),
            {.slots = 2});
        CHECK(call(*program, 1, 0, 0, slots));
        CHECK(target == expected);
    }
}

TEST(copy_through_both_copies_of_windows) {
    const auto group = std::make_shared<Group>(2, 10.0, nullptr);
    group->grow(10'000);
    CHECK_EQ(group->capacity() % Mapping::page_bytes(), std::size_t{0});
    CHECK_LE(std::size_t{10'000}, group->capacity());
    const auto source = noise(600, 7);
    std::vector<std::uint8_t> target(600);
    // User memory -> the other copy of rank 1's window at 1000, pitch 100 -> back from there.
    Rows rows;
    rows.on(0, 0).step(0).copy({0}, {1, 2, 3}, 6, 50, {}, 2);
    rows.step(1).copy({1, 2, 3}, {2}, 6, 50, {}, 1);
    const std::vector<std::int64_t> windows{1, 1, 1000, 100};
    const auto program = bound(group, 0, rows, {.steps = 2, .slots = 3}, windows);
    CHECK_EQ(program->window_bytes(), std::size_t{1000 + 7 * 100 + 3 + 50});
    Slots slots(3);
    slots.set(0, source.data(), 100);
    slots.set(2, target.data(), 100);
    for (int copy = 0; copy < kWindowCopies; ++copy) {
        CHECK(call(*program, 1, copy, 0, slots));
        const auto* landed =
            reinterpret_cast<const std::uint8_t*>(group->window(1, copy ^ 1)) + 1000;
        for (std::size_t row = 0; row < 6; ++row) {
            for (std::size_t byte = 0; byte < 50; ++byte) {
                CHECK_EQ(+landed[(row + 2) * 100 + byte + 3], +source[row * 100 + byte]);
                CHECK_EQ(+target[row * 100 + byte], +source[row * 100 + byte]);
            }
        }
    }
    CHECK_EQ(+*reinterpret_cast<const std::uint8_t*>(group->window(1, 0)), 0);
}

TEST(copy_of_nothing_needs_no_address) {
    const auto group = std::make_shared<Group>(1, 10.0, nullptr);
    const auto program =
        bound(group, 0, Rows().copy({0}, {1}, 0, 8).copy({0}, {1}, 8, 0), {.slots = 2});
    CHECK(call(*program, 1, 0, 0, Slots(2)));
    const auto some = bound(group, 0, Rows().copy({0}, {1}, 1, 1), {.slots = 2});
    CHECK_THROWS(std::invalid_argument, "slot 0 has no address", call(*some, 1, 0, 0, Slots(2)));
}
