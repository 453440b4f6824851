// The words of a program that a kernel stores or waits for, their order, and the words that the
// stream writes.
#include <string>
#include <vector>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/gpu_program.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr GpuAddress kStoredFirst = 0x1000;
constexpr GpuAddress kStoredOther = 0x9000;  // of the call's other copy
constexpr GpuAddress kStop = 0x500;
const auto kStoring = reinterpret_cast<GpuStream>(5);

using Acts = std::vector<std::string>;

// A program of one rank, and its commands for a device that has the kernel.
struct Storing {
    explicit Storing(const Rows& rows, int segments = 1, GpuAddress stop = 0) {
        gpu->lacks = "";
        const auto rank = std::make_shared<GpuRank>(gpu, group, 0);
        rank->watch().set_stop_word(stop);
        const std::vector<GpuAddress> words{kStoredFirst, kStoredOther}, data{0x100000, 0x200000};
        program = std::make_unique<GpuProgram>(
            rank, std::make_shared<GpuWindow>(words, data, std::size_t{1} << 16),
            Binding{0, rows.fields(), {}, segments, 4, 0}, 7);
        for (int i = 0; i + 1 < segments; ++i) program->set_launches(i, 0, -1, {});
    }
    // The commands between the call's begin and its end.
    Acts call(int copy = 0, bool traced = false) {
        gpu->told.clear();
        gpu->stored.clear();
        program->call(copy, kStoring, traced, {}, {});
        CHECK(gpu->told.back() == "record");
        gpu->told.pop_back();
        return gpu->told;
    }

    std::shared_ptr<FakeGpu> gpu = std::make_shared<FakeGpu>();
    std::shared_ptr<Group> group = std::make_shared<Group>(1, 5.0, nullptr);
    std::unique_ptr<GpuProgram> program;
};

// A call's end: it waits for a word, and clears and raises numbers of words, as one step.
Rows ending(int cleared, int raised, Raising how = Raising::store) {
    Rows rows;
    rows.on(0, kInline).step(0).wait(0, data_word(0, 0)).by(how).step(1);
    for (int i = 0; i < cleared; ++i) rows.clear(0, data_word(0, i));
    for (int i = 0; i < raised; ++i) rows.raise(0, free_word(i));
    return rows;
}

// A kernel that expects a word, and then a call's end by a kernel.
Rows ending_behind_a_kernel() {
    Rows rows;
    rows.on(0, kInline).step(0).expect(0, data_word(0, 0));
    rows.by(Raising::store).on(1, kInline).step(1).clear(0, data_word(0, 0));
    rows.raise(0, free_word(0));
    return rows;
}

}  // namespace

TEST(a_kernel_stores_what_ends_a_call) {
    Storing bench(ending(3, 2));
    for (const int copy : {0, 1}) {
        CHECK((bench.call(copy) == Acts{"words", "store"}));
        const auto& [writes, stream] = bench.gpu->stored.at(0);
        CHECK_EQ(stream, kStoring);
        CHECK_EQ(writes.size(), 5U);  // the cleared words, the raised words
        for (std::size_t i = 0; i < writes.size(); ++i) {
            CHECK_EQ(writes[i].value, i < 3 ? 0U : 1U);
            CHECK(writes[i].kind == WordCommand::Kind::write);
        }
        const GpuAddress words = copy == 0 ? kStoredFirst : kStoredOther;
        CHECK_EQ(writes[0].address, words + 4 * static_cast<GpuAddress>(data_word(0, 0)));
        CHECK_EQ(writes[4].address, words + 4 * static_cast<GpuAddress>(free_word(1)));
    }
}

TEST(a_row_says_whether_the_stream_writes_its_word) {
    CHECK((Storing(ending(3, 2, Raising::write)).call() == Acts{"words"}));
    Rows rows;
    rows.on(0, kInline).step(0).wait(0, data_word(0, 0)).step(1).clear(0, data_word(0, 0));
    rows.by(Raising::store).step(2).raise(0, free_word(0));
    CHECK((Storing(rows).call() == Acts{"words", "store"}));
}

TEST(a_kernel_behind_a_kernel_that_waits_clears_the_watchdogs_word_too) {
    Storing bench(ending_behind_a_kernel(), 2);
    CHECK((bench.call() == Acts{"words", "store"}));  // the watchdog's word is set before
    const auto& writes = bench.gpu->stored.at(0).writes;
    CHECK_EQ(writes.size(), 3U);
    CHECK_EQ(writes[0].value, 0U);
    CHECK_EQ(writes[2].value, 1U);
}

TEST(the_words_of_each_step_are_stored_by_one_kernel) {
    Rows rows;
    rows.by(Raising::store).on(0, kInline).step(0);
    for (int i = 0; i < 3; ++i) rows.raise(0, free_word(i));
    rows.step(1);
    for (int i = 0; i < 3; ++i) rows.clear(0, data_word(0, i));
    rows.raise(0, free_word(3));
    Storing bench(rows);
    CHECK((bench.call() == Acts{"store", "store"}));
    CHECK_EQ(bench.gpu->stored[0].writes.size(), 3U);
    CHECK_EQ(bench.gpu->stored[1].writes.size(), 4U);
}

TEST(a_step_with_more_words_than_a_kernel_stores_is_refused) {
    Rows rows;
    rows.by(Raising::store).on(0, kInline).step(0);
    for (int i = 0; i <= static_cast<int>(kMostStored); ++i) rows.clear(0, data_word(0, i));
    CHECK_THROWS(std::invalid_argument, "more words than one kernel takes", Storing{rows});
}

TEST(a_traced_step_has_times_around_its_kernel) {
    Storing bench(ending(3, 3));
    const Acts told = bench.call(0, true);
    const Acts wanted{"record", "words", "record",   // waits
                      "record", "store", "record"};  // clears and raises
    CHECK(told == wanted);
}

TEST(a_graph_that_loses_a_store_is_refused) {
    Storing bench(ending(3, 2));
    bench.gpu->graph = true;
    bench.call();
    bench.gpu->drops = true;
    CHECK_THROWS(GpuError, "has 0 kernels of the 1 that were submitted",
                 bench.program->call(0, kStoring, false, {}, {}));
}

TEST(a_kernel_waits_for_the_words_of_a_step) {
    Rows rows;
    rows.by(Raising::store).on(0, kInline).step(0);
    rows.wait(0, data_word(0, 0)).wait(0, data_word(0, 2));
    rows.step(1).wait(0, free_word(0)).by(Raising::write).step(2).clear(0, data_word(0, 0));
    CHECK_THROWS(std::invalid_argument, "needs a stop word", Storing{rows});
    Storing bench(rows, 1, kStop);
    for (const int copy : {0, 1}) {
        bench.gpu->kernel_waits.clear();
        CHECK((bench.call(copy) == Acts{"await", "await", "words"}));
        const auto& [words, wait, stream] = bench.gpu->kernel_waits.at(0);
        const GpuAddress base = copy == 0 ? kStoredFirst : kStoredOther;
        CHECK_EQ(stream, kStoring);
        CHECK_EQ(words.size(), 2U);
        CHECK_EQ(words[1].address, base + 4 * static_cast<GpuAddress>(data_word(0, 2)));
        CHECK_EQ(words[1].value, 1U);
        CHECK_EQ(words[1].number, static_cast<std::uint32_t>(data_word(0, 2)) + 1);
        CHECK_EQ(wait.stop, kStop);
        CHECK(wait.limit_ns > 5'000'000'000);  // the group's time limit is 5 s
        CHECK_EQ(wait.data_bytes, std::size_t{1} << 16);
        CHECK(wait.mark != bench.gpu->kernel_waits.at(1).wait.mark);
    }
}

TEST(a_kernel_waits_on_the_callers_stream_alone) {
    Rows rows;
    rows.by(Raising::store).on(0, 0).step(0).wait(0, data_word(0, 0));
    CHECK_THROWS(std::invalid_argument, "on the caller's stream alone", Storing(rows, 1, kStop));
    rows = Rows();
    rows.by(Raising::copy).on(0, kInline).step(0).wait(0, data_word(0, 0));
    CHECK_THROWS(std::invalid_argument, "not by a copy", Storing(rows, 1, kStop));
}
