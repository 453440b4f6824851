// Words, `after` and segments order rows over many lanes, ranks and calls.
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ficco/clock.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

TEST(ring_of_ranks_over_several_lanes) {
    constexpr int kRanks = 4;
    constexpr int kLanes = 3;
    constexpr int kRounds = 1500;
    const auto group = std::make_shared<Group>(kRanks, 60.0, nullptr);
    std::vector<std::unique_ptr<Program>> programs;
    for (int rank = 0; rank < kRanks; ++rank) {
        const int next = (rank + 1) % kRanks;
        const int previous = (rank + kRanks - 1) % kRanks;
        Rows rows;
        for (int round = 0; round < kRounds; ++round) {
            for (int lane = 0; lane < kLanes; ++lane) {
                rows.on(0, lane);
                if (rank == 0) rows.raise(next, data_word(rank, lane), round + 1);
                rows.wait(rank, data_word(previous, lane), round + 1);
                rows.clear(rank, data_word(previous, lane));
                if (rank != 0) rows.raise(next, data_word(rank, lane), round + 1);
            }
        }
        programs.push_back(bound(group, rank, rows, {}));
    }
    for (int repeat = 0; repeat < 2; ++repeat) {
        for (auto& program : programs) program->start(0, 0, {}, {});
        for (auto& program : programs) CHECK(program->submit(0));
        for (auto& program : programs) CHECK(program->finish());
    }
    CHECK(!group->failure());
}

namespace {

// A call as plans make it, for one rank of two: rows of 8 bytes, pushed in chunks of one row.
//   segment 0: wait for and clear `free`; raise `entered`; push chunks, `data` behind each
//   segment 1: wait for `entered` and all data       segment 2: clear them, raise `free`
constexpr int kChunks = 3;

Rows protocol(int rank) {
    const int peer = 1 - rank;
    Rows rows;
    rows.on(0, -1).step(0).wait(rank, free_word(peer)).step(1).clear(rank, free_word(peer));
    rows.step(2).raise(peer, entered_word(rank), 0, true);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        rows.on(0, chunk % 2).step(3).copy({0, chunk}, {1, chunk}, 1, 8);
        rows.step(4).raise(peer, data_word(rank, chunk));
    }
    rows.on(1, -1).step(5).wait(rank, entered_word(peer), 0, true);
    for (int chunk = 0; chunk < kChunks; ++chunk) rows.wait(rank, data_word(peer, chunk));
    rows.on(2, -1).step(6).clear(rank, entered_word(peer));
    for (int chunk = 0; chunk < kChunks; ++chunk) rows.clear(rank, data_word(peer, chunk));
    rows.step(7).raise(peer, free_word(rank));
    return rows;
}

// Runs `calls` calls of one rank; received data must be those that the peer sent in the same call.
void run_protocol(const std::shared_ptr<Group>& group, int rank, int calls) {
    const std::vector<std::int64_t> windows{1, 1 - rank, 64, 8};
    const auto program =
        bound(group, rank, protocol(rank), {.segments = 3, .steps = 8, .slots = 2}, windows);
    std::mt19937 random(static_cast<unsigned>(rank));
    std::vector<std::int64_t> mine(kChunks);
    Slots slots(2);
    slots.set(0, mine.data(), 8);
    const auto sent = [](int from, int number, int chunk) {
        return std::int64_t{from} * 1'000'000'000 + std::int64_t{number} * 10 + chunk;
    };
    for (int number = 0; number < calls; ++number) {
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            mine[static_cast<std::size_t>(chunk)] = sent(rank, number, chunk);
        }
        const int copy = (number + number / 7) % kWindowCopies;  // alternates, but not always
        program->start(copy, 77 + static_cast<std::uint32_t>(number), slots.addresses,
                       slots.pitches);
        CHECK(program->submit(0));
        CHECK(program->submit(1));
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            std::int64_t found = 0;
            std::memcpy(&found, group->window(rank, copy) + 64 + chunk * 8, 8);
            CHECK_EQ(found, sent(1 - rank, number, chunk));
        }
        if (random() % 64 == 0) {  // drift
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        }
        CHECK(program->submit(2));
        CHECK(program->finish());
    }
}

}  // namespace

TEST(protocol_of_two_ranks_that_drift) {
    constexpr int kCalls = 10'000;
    const auto group = std::make_shared<Group>(2, 60.0, nullptr);
    group->grow(64 + kChunks * 8);
    std::thread other([&] { run_protocol(group, 1, kCalls); });
    run_protocol(group, 0, kCalls);
    other.join();
    // What a call restores.
    for (int rank = 0; rank < 2; ++rank) {
        for (int copy = 0; copy < kWindowCopies; ++copy) {
            for (int index = 0; index < kWordsPerCopy; ++index) {
                CHECK_EQ(group->word(rank, copy, index).load(),
                         index == free_word(1 - rank) ? 1U : 0U);
            }
        }
    }
}

TEST(words_lie_in_the_copy_that_rows_ask_for) {
    const auto group = std::make_shared<Group>(2, 10.0, nullptr);
    const auto program = bound(group, 0,
                               Rows()
                                   .on(0, 0)
                                   .raise(1, data_word(0, 0), 5)
                                   .raise(1, data_word(0, 1), 6, false, 1)
                                   .raise(0, data_word(0, 2), 7, true, 1)
                                   .wait(0, data_word(0, 2), 8, true, 1)
                                   .clear(0, data_word(0, 2), 1),
                               {});
    for (int copy = 0; copy < kWindowCopies; ++copy) {
        CHECK(call(*program, 1, copy, 99));
        CHECK_EQ(group->word(1, copy, data_word(0, 0)).load(), 5U);
        CHECK_EQ(group->word(1, copy ^ 1, data_word(0, 0)).load(), 0U);
        CHECK_EQ(group->word(1, copy, data_word(0, 1)).load(), 0U);
        CHECK_EQ(group->word(1, copy ^ 1, data_word(0, 1)).load(), 6U);
        CHECK_EQ(group->word(0, copy ^ 1, data_word(0, 2)).load(), 0U);
        group->reset();
    }
}

TEST(after_orders_lanes) {
    const auto group = std::make_shared<Group>(1, 30.0, nullptr);
    // lane 0: a -> b            lane 1: after it, b -> c       inline: after that, c -> d
    // Step 0 has two rows, and is not done before both have ended.
    constexpr std::size_t kCount = 1 << 18;
    Rows rows;
    rows.on(0, 1).step(1).after(0).copy({1}, {2}, 1, kCount);
    rows.on(0, 0).step(0).copy({0}, {1}, 1, kCount / 2);
    rows.copy({0, 0, kCount / 2}, {1, 0, kCount / 2}, 1, kCount / 2);
    rows.on(0, -1).step(2).after(1).copy({2}, {3}, 1, kCount);
    const auto program = bound(group, 0, rows, {.steps = 3, .slots = 4});
    std::vector<std::vector<std::uint8_t>> memory(4, std::vector<std::uint8_t>(kCount));
    Slots slots(4);
    for (std::size_t slot = 0; slot < 4; ++slot) slots.set(slot, memory[slot].data(), 0);
    for (int round = 1; round <= 100; ++round) {
        memory[0].assign(kCount, static_cast<std::uint8_t>(round));
        CHECK(call(*program, 1, 0, 0, slots));
        CHECK(memory[3] == memory[0]);
        std::vector<StepTimes> times(3);
        program->times(times);
        CHECK_LE(std::int64_t{1}, times[0].start_ns);
        CHECK_LE(times[0].end_ns, times[1].end_ns);
        CHECK_LE(times[1].end_ns, times[2].end_ns);
    }
}

TEST(after_waits_for_marked_steps) {
    const auto group = std::make_shared<Group>(1, 30.0, nullptr);
    // Steps 0 and 2 are the caller's; that step 2 has a row to wait for step 1 does not end it.
    Rows rows;
    rows.on(0, 0).step(1).after(0).copy({0}, {1}, 1, 8);
    rows.on(0, 1).step(3).after(2).copy({0}, {1, 1}, 1, 8);
    rows.on(1, -1).step(2).after(1);
    const auto program = bound(group, 0, rows, {.segments = 2, .steps = 4, .slots = 2});
    const std::int64_t from = 42;
    std::int64_t to[2] = {0, 0};
    Slots slots(2);
    slots.set(0, &from, 8);
    slots.set(1, to, 8);
    const auto ended = [&program](std::size_t step) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        std::vector<StepTimes> times(4);
        program->times(times);
        return times[step].end_ns != 0;
    };
    program->start(0, 0, slots.addresses, slots.pitches);
    CHECK(program->submit(0));
    CHECK(!ended(1));
    program->mark(0);
    CHECK(program->submit(1));
    CHECK(ended(1));
    CHECK(!ended(3));
    program->mark(2);
    CHECK(program->finish());
    CHECK_EQ(to[0], 42);
    CHECK_EQ(to[1], 42);
}

TEST(rows_behind_a_blocking_inline_row_are_handed_over_after_it) {
    const auto group = std::make_shared<Group>(2, 30.0, nullptr);
    // Lane 0's second copy must not run before the inline wait, nor may its first one be late.
    Rows rows;
    rows.on(0, 0).step(0).copy({0}, {1}, 1, 8).raise(1, data_word(0, 0));
    rows.on(0, -1).step(1).raise(1, data_word(0, 1)).wait(0, data_word(1, 0));
    rows.on(0, 0).step(2).copy({0}, {1, 1}, 1, 8);
    const auto program = bound(group, 0, rows, {.steps = 3, .slots = 2});
    const auto peer = bound(group, 1,
                            Rows()
                                .on(0, -1)
                                .wait(1, data_word(0, 0))
                                .wait(1, data_word(0, 1))
                                .raise(0, data_word(1, 0)),
                            {});
    const std::int64_t from = 42;
    std::int64_t to[2] = {0, 0};
    Slots slots(2);
    slots.set(0, &from, 8);
    slots.set(1, to, 8);
    std::thread other([&] { CHECK(call(*peer, 1)); });
    CHECK(call(*program, 1, 0, 0, slots));
    other.join();
    std::vector<StepTimes> times(3);
    program->times(times);
    CHECK_EQ(to[1], 42);
    CHECK_LE(times[1].end_ns, times[2].start_ns);
}
