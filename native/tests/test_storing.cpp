// The words of a program that a kernel stores, their order, and the words that the stream writes.
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
const auto kStoring = reinterpret_cast<GpuStream>(5);

using Acts = std::vector<std::string>;

// A program of one rank, and its commands for a device that has the kernel.
struct Storing {
    explicit Storing(const Rows& rows, const std::string& lacks = "") {
        gpu->lacks = lacks;
        const std::vector<GpuAddress> words{kStoredFirst, kStoredOther}, data{0x100000, 0x200000};
        program = std::make_unique<GpuProgram>(
            std::make_shared<GpuRank>(gpu, group, 0),
            std::make_shared<GpuWindow>(words, data, std::size_t{1} << 16),
            Binding{0, rows.fields(), {}, 1, 4, 0}, 7);
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

// A call's end: it waits for a word, and clears and raises numbers of words.
Rows ending(int cleared, int raised, int lane = kInline) {
    Rows rows;
    rows.on(0, lane).step(0).wait(0, data_word(0, 0)).step(1);
    for (int i = 0; i < cleared; ++i) rows.clear(0, data_word(0, i));
    rows.step(2);
    for (int i = 0; i < raised; ++i) rows.raise(0, free_word(i));
    return rows;
}

}  // namespace

TEST(a_kernel_stores_what_ends_a_call) {
    Storing bench(ending(3, 2));
    for (const int copy : {0, 1}) {
        CHECK((bench.call(copy) == Acts{"words", "store"}));
        const auto& [writes, stream] = bench.gpu->stored.at(0);
        CHECK_EQ(stream, kStoring);
        // The watchdog's word after the wait, the cleared words, the raised words.
        CHECK_EQ(writes.size(), 6U);
        for (std::size_t i = 0; i < writes.size(); ++i) {
            CHECK_EQ(writes[i].value, i < 4 ? 0U : 1U);
            CHECK(writes[i].kind == WordCommand::Kind::write);
        }
        const GpuAddress words = copy == 0 ? kStoredFirst : kStoredOther;
        CHECK_EQ(writes[1].address, words + 4 * static_cast<GpuAddress>(data_word(0, 0)));
        CHECK_EQ(writes[5].address, words + 4 * static_cast<GpuAddress>(free_word(1)));
    }
}

TEST(streams_write_few_words_and_those_of_other_lanes) {
    CHECK((Storing(ending(1, 0)).call() == Acts{"words"}));  // with the watch's there are two
    CHECK((Storing(ending(1, 1)).call() == Acts{"words", "store"}));
    CHECK((Storing(ending(3, 2), "it lacks it").call() == Acts{"words"}));
    const Acts aside{"record", "words", "record"};  // fork and join
    CHECK(Storing(ending(3, 2, 0)).call() == aside);
}

TEST(no_word_is_cleared_before_one_that_stands_before_it_is_raised) {
    Rows rows;
    rows.on(0, kInline).step(0);
    for (int i = 0; i < 3; ++i) rows.raise(0, free_word(i));
    for (int i = 0; i < 3; ++i) rows.clear(0, data_word(0, i));
    rows.raise(0, free_word(3)).clear(0, data_word(0, 3));
    rows.wait(0, data_word(0, 4)).raise(0, free_word(4));
    Storing bench(rows);
    // Then the last 0, the watchdog's word set, the wait, the watchdog's word cleared, the raise.
    CHECK((bench.call() == Acts{"store", "store", "words"}));
    CHECK_EQ(bench.gpu->stored[0].writes.size(), 3U);
    CHECK_EQ(bench.gpu->stored[1].writes.size(), 4U);
    CHECK_EQ(bench.gpu->stored[1].writes[2].value, 0U);
    CHECK_EQ(bench.gpu->stored[1].writes[3].value, 1U);
}

TEST(many_words_take_several_kernels) {
    Rows rows;
    rows.on(0, kInline).step(0);
    const int count = 2 * static_cast<int>(kMostStored) + 2;
    for (int i = 0; i < count; ++i) rows.clear(0, data_word(0, i));
    Storing bench(rows);
    CHECK((bench.call() == Acts{"store", "store", "words"}));
    for (const auto& stored : bench.gpu->stored) CHECK_EQ(stored.writes.size(), kMostStored);
}

TEST(a_step_whose_time_is_taken_is_stored_by_itself) {
    Storing bench(ending(3, 3));
    const Acts told = bench.call(0, true);
    const Acts wanted{"record", "words", "record",   // waits
                      "record", "store", "record",   // clears
                      "record", "store", "record"};  // raises
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
