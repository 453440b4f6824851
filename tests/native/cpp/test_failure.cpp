// A wait that never ends soon fails the group on all ranks, and a reset restores it.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "check.hpp"
#include "ficco/clock.hpp"
#include "ficco/interrupt.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

// The number of threads of lanes. Other threads do not count, such as those of a sanitizer.
std::ptrdiff_t lanes() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::count_if(begin(tasks), end(tasks), [](const auto& task) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        return name.starts_with("ficco r");
    });
}

// The kernel may take a moment to forget a thread that has been joined.
void wait_for_no_lane() {
    const std::int64_t start = now_ns();
    while (lanes() != 0) {
        CHECK_LE(now_ns() - start, kSoonNs);
        usleep(1000);
    }
}

}  // namespace

TEST(a_question_interrupts_waits_of_the_caller_and_of_lanes) {
    for (const int lane : {-1, 0}) {
        const auto group = std::make_shared<Group>(2, 60.0, nullptr);
        const auto program = bound(group, 0, Rows().on(0, lane).wait(0, data_word(1, 0)), {});
        const std::int64_t start = now_ns();
        {
            const InterruptScope scope([]() noexcept { return true; });
            CHECK(!call(*program, 1));
        }
        CHECK_LE(now_ns() - start, kSoonNs);
        CHECK(group->failure()->kind == Failure::Kind::stopped);
        CHECK_EQ(group->failure()->rank, 0);
        CHECK(!InterruptScope::interrupted());
    }
}

TEST(timeout_fails_all_ranks_and_reset_heals) {
    const auto group = std::make_shared<Group>(2, 1000.0, nullptr);
    // Rank 0 waits for a digest that is another one; rank 1 for a word that nobody raises, and has
    // much behind it.
    const auto first =
        bound(group, 0, Rows().on(0, 0).step(4).wait(0, entered_word(1), 0, true), {.steps = 5});
    Rows rows;
    rows.on(0, 1).step(0).raise(0, entered_word(1), 99);
    rows.on(0, 0).wait(1, data_word(0, 3));
    for (int word = 0; word < 100; ++word) rows.wait(1, data_word(0, word));
    rows.on(0, 2).step(1).after(0).raise(0, data_word(1, 0));
    rows.on(1, 0).raise(0, data_word(1, 1));  // queued behind the wait that fails
    const auto second = bound(group, 1, rows, {.segments = 2, .steps = 2});
    for (int round = 0; round < 5; ++round) {
        second->start(0, 0, {}, {});
        second->submit(0);
        second->submit(1);
        while (group->word(0, 0, entered_word(1)).load() != 99) usleep(1000);
        first->start(0, 7, {}, {});
        first->submit(0);
        group->set_timeout_s(0.05);  // from here on, as a busy machine may be slow
        const std::int64_t start = now_ns();
        CHECK(!first->finish());
        CHECK(!second->finish());
        CHECK_LE(now_ns() - start, kSoonNs);

        const auto failure = group->failure();
        CHECK(failure.has_value());
        CHECK(failure->kind == Failure::Kind::timeout);
        CHECK_LE(0.05, failure->seconds);
        if (failure->rank == 0) {
            CHECK_EQ(failure->step, 4);
            CHECK_EQ(failure->word_rank, 0);
            CHECK_EQ(failure->word_index, entered_word(1));
            CHECK_EQ(failure->found, 99U);
            CHECK_EQ(failure->expected, 7U);
        } else if (failure->word_rank == 1) {
            CHECK_EQ(failure->word_index, data_word(0, 3));
        } else {
            CHECK_EQ(failure->word_rank, -1);  // the `after` of step 1
            CHECK_EQ(failure->word_index, 0);
        }
        CHECK_EQ(group->word(0, 0, data_word(1, 0)).load(), 0U);  // skipped
        CHECK_EQ(group->word(0, 0, data_word(1, 1)).load(), 0U);
        CHECK_THROWS(std::runtime_error, "reset it first", first->start(0, 7, {}, {}));

        group->set_timeout_s(1000.0);
        group->reset();
        CHECK(!group->failure());
        CHECK_EQ(group->word(0, 0, entered_word(1)).load(), 0U);
        CHECK_EQ(group->word(0, 0, free_word(1)).load(), 1U);
        const auto well = bound(group, 0, Rows().on(0, 0).wait(0, free_word(1)), {});
        CHECK(call(*well, 1));
    }
}

TEST(fail_ends_waits_and_paced_copies_soon) {
    const auto fabric = std::make_shared<Fabric>(2, Fabric::Per::port, 1e-6);
    const auto group = std::make_shared<Group>(2, 1000.0, fabric);
    std::vector<std::uint8_t> memory(2'000'000);
    Slots slots(2);
    slots.set(0, memory.data(), 0);
    slots.set(1, memory.data() + 1'000'000, 0);
    Rows rows;
    rows.on(0, 0).wait(0, data_word(1, 0));
    rows.on(0, 1).copy({0}, {1}, 1, 1'000'000, {0, 1});  // 1000 s
    rows.on(0, 2).after(1);
    rows.on(0, -1).wait(0, data_word(1, 1));
    const auto program = bound(group, 0, rows, {.steps = 2, .slots = 2});
    std::int64_t start = 0;
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        start = now_ns();
        group->fail(1);
        group->fail(0);
    });
    CHECK(!call(*program, 1, 0, 0, slots));
    const std::int64_t end = now_ns();
    other.join();
    CHECK_LE(end - start, kSoonNs);
    const auto failure = group->failure();
    CHECK(failure->kind == Failure::Kind::stopped);
    CHECK_EQ(failure->rank, 1);
    CHECK_EQ(failure->step, -1);
    CHECK_THROWS(std::invalid_argument, "rank is 2", group->fail(2));
}

TEST(timeout_may_be_set_while_waiting) {
    const auto group = std::make_shared<Group>(1, 1000.0, nullptr);
    const auto program = bound(group, 0, Rows().on(0, 0).wait(0, data_word(0, 0)), {});
    program->start(0, 0, {}, {});
    CHECK(program->submit(0));
    group->set_timeout_s(0.01);
    const std::int64_t start = now_ns();
    CHECK(!program->finish());
    CHECK_LE(now_ns() - start, kSoonNs);
}

TEST(no_thread_outlives_its_group) {
    wait_for_no_lane();  // of earlier tests
    const auto rows = [] {
        Rows waiting;
        for (int lane = 0; lane < 5; ++lane) waiting.on(0, lane).wait(0, data_word(0, lane));
        return waiting;
    }();
    for (int round = 0; round < 20; ++round) {
        auto group = std::make_shared<Group>(1, 0.02, nullptr);
        auto program = bound(group, 0, rows, {});
        CHECK_EQ(lanes(), 5);
        if (round % 2 == 0) {  // busy
            program->start(0, 0, {}, {});
            program->submit(0);
        }
        if (round % 3 == 0) {
            program.reset();
            CHECK_EQ(lanes(), 5);
            group.reset();
        } else {
            group.reset();
            CHECK_EQ(lanes(), 5);
            program.reset();
        }
        wait_for_no_lane();
    }
}

TEST(destroyed_while_running_lets_its_lanes_end) {
    const auto group = std::make_shared<Group>(2, 60.0, nullptr);
    auto program = bound(group, 0,
                         Rows()
                             .on(0, 0)
                             .wait(0, data_word(1, 0))
                             .clear(0, data_word(1, 0))
                             .raise(1, data_word(0, 0)),
                         {});
    program->start(0, 0, {}, {});
    CHECK(program->submit(0));
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        Group::raise(group->word(0, 0, data_word(1, 0)), 1);
    });
    program.reset();
    CHECK_EQ(group->word(1, 0, data_word(0, 0)).load(), 1U);
    other.join();
    CHECK(!group->failure());
    group->reset();  // no program runs
}
