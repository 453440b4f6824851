// Raises of words at a peer by a program: the command, its source, and its order.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/gpu_program.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr GpuAddress kSenderWords = 0x1000;
constexpr GpuAddress kPeerWords = 0x2000;  // of the first copy; those of the other are 0x100 on
constexpr std::uint32_t kSenderDigest = 7;
constexpr int kPushLane = 0;
const auto kSenderStream = reinterpret_cast<GpuStream>(5);

using Acts = std::vector<std::string>;

GpuAddress peer_word(int copy, int index) {
    return kPeerWords + 0x100 * static_cast<GpuAddress>(copy) + 4 * static_cast<GpuAddress>(index);
}

// Rank 0 of 2, with slots for a sent matrix and its target.
struct Sender {
    explicit Sender(const Rows& rows, bool writable = false, const std::string& lacks = "") {
        gpu->lacks = lacks;
        const std::vector<GpuAddress> words{kSenderWords, kSenderWords + 0x100, kPeerWords,
                                            kPeerWords + 0x100};
        const std::vector<GpuAddress> data{0x100000, 0x200000, 0x300000, 0x400000};
        program = std::make_unique<GpuProgram>(
            std::make_shared<GpuRank>(gpu, group, 0),
            std::make_shared<GpuWindow>(words, data, std::size_t{1} << 16,
                                        std::vector<bool>{true, writable}),
            Binding{0, rows.fields(), {}, 1, 4, 2}, kSenderDigest);
    }

    // The device's commands in a call, without the events of fork and join.
    Acts call(int copy = 0, bool traced = false) {
        gpu->told.clear();
        gpu->copied.clear();
        gpu->stored.clear();
        const std::array<std::uint64_t, 2> addresses{0x10000, 0x20000};
        const std::array<std::int64_t, 2> pitches{256, 256};
        program->call(copy, kSenderStream, traced, addresses, pitches);
        return gpu->told;
    }

    std::shared_ptr<FakeGpu> gpu = std::make_shared<FakeGpu>();
    std::shared_ptr<Group> group = std::make_shared<Group>(2, 5.0, nullptr);
    std::unique_ptr<GpuProgram> program;
};

// A push lane: the call's entry, then a matrix and the signal after it.
Rows pushing_rows(Raising how = Raising::copy) {
    Rows rows;
    rows.by(how).on(0, kPushLane).step(0).raise(1, entered_word(0), 1, true);
    rows.step(1).copy({0}, {1}, 4, 256).step(2).raise(1, data_word(0, 0));
    return rows;
}

void check_signal_copy(const BoxCopy& copy, GpuAddress to, std::uint32_t value) {
    CHECK_EQ(copy.to, to);
    CHECK_EQ(copy.from, FakeGpu::kConstants + 4 * GpuAddress{value});
    CHECK_EQ(copy.rows, 1);
    CHECK_EQ(copy.row_bytes, 4);
}

}  // namespace

TEST(a_push_lane_signals_by_a_copy_behind_the_data) {
    Sender bench(pushing_rows());
    for (const int copy : {0, 1}) {
        CHECK((bench.call(copy) == Acts{"record", "copy", "copy", "copy", "record", "record"}));
        const auto& copied = bench.gpu->copied;
        check_signal_copy(copied.at(0), peer_word(copy, entered_word(0)), kSenderDigest);
        CHECK_EQ(copied.at(1).from, 0x10000U);  // the data
        check_signal_copy(copied.at(2), peer_word(copy, data_word(0, 0)), 1);
    }
    CHECK_EQ(bench.program->copies(), 1);  // of data
}

TEST(a_stream_writes_words_where_the_driver_allows_it) {
    Sender bench(pushing_rows(Raising::write), true);
    CHECK((bench.call() == Acts{"record", "words", "copy", "words", "record", "record"}));
}

TEST(signals_that_follow_one_another_keep_their_order) {
    Rows rows;
    rows.by(Raising::copy).on(0, kPushLane).step(0);
    for (int i = 0; i < 3; ++i) rows.raise(1, data_word(0, i));
    rows.by(Raising::write).clear(0, data_word(1, 0)).by(Raising::copy).raise(1, free_word(0));
    Sender bench(rows);
    CHECK((bench.call() ==
           Acts{"record", "copy", "copy", "copy", "words", "copy", "record", "record"}));
    for (int i = 0; i < 3; ++i) {
        check_signal_copy(bench.gpu->copied.at(static_cast<std::size_t>(i)),
                          peer_word(0, data_word(0, i)), 1);
    }
}

TEST(on_the_callers_stream_a_kernel_stores_the_words_of_a_step) {
    Rows rows;
    rows.by(Raising::store).on(0, kInline).step(0).clear(0, data_word(1, 0));
    rows.raise(1, free_word(0));
    Sender bench(rows);
    CHECK((bench.call() == Acts{"store", "record"}));
    const auto& writes = bench.gpu->stored.at(0).writes;
    CHECK_EQ(writes.size(), 2U);
    CHECK_EQ(writes[0].value, 0U);
    CHECK_EQ(writes[1].address, peer_word(0, free_word(0)));
    CHECK_THROWS(std::invalid_argument, "it has no kernel",
                 Sender(rows, false, "it has no kernel"));
}

TEST(rows_are_refused_where_the_device_cannot_store_so) {
    Rows aside;
    aside.by(Raising::store).on(0, kPushLane).step(0).raise(1, free_word(0));
    CHECK_THROWS(std::invalid_argument, "on the caller's stream", Sender{aside});
    CHECK_THROWS(std::invalid_argument, "may not write", Sender(pushing_rows(Raising::write)));
}

TEST(waits_and_own_words_stay_with_the_stream) {
    Rows rows;
    rows.on(0, kInline).step(0).wait(0, data_word(1, 0)).step(1).clear(0, data_word(1, 0));
    Sender bench(rows);
    CHECK((bench.call() == Acts{"words", "record"}));
}

TEST(a_traced_call_takes_the_time_of_a_signal) {
    Sender bench(pushing_rows());
    const Acts told = bench.call(0, true);
    // Fork; each of three steps between two times; join.
    const Acts wanted{"record", "record", "copy", "record", "record", "copy",
                      "record", "record", "copy", "record", "record", "record"};
    CHECK(told == wanted);
}

TEST(a_graph_that_loses_a_signal_is_refused) {
    Sender bench(pushing_rows());
    bench.gpu->graph = true;
    bench.call();
    bench.gpu->lost_copies = 1;
    CHECK_THROWS(GpuError, "has 2 copies of the 3 that were submitted", bench.call());
}

TEST(a_window_knows_which_of_its_words_are_writable) {
    const std::vector<GpuAddress> two(4, 0);
    CHECK_THROWS(std::invalid_argument, "writable has 3 entries, the window has 2 ranks",
                 GpuWindow(two, two, 0, {true, true, true}));
    CHECK(GpuWindow(two, two, 0).writable(1));
}
