// Programs that launch kernels: arguments, order, and refusals.
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/gpu_program.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

using Row = std::array<std::int64_t, kParameterFields>;

constexpr std::int64_t kMapBytes = 128;
constexpr std::size_t kDataBytes = 1 << 16;
constexpr std::int64_t kWindowPitch = 256;
const auto kKernel = reinterpret_cast<GpuKernel>(77);
const auto kStream = reinterpret_cast<GpuStream>(5);

Row constant(std::int64_t bytes, std::int64_t value) { return {0, bytes, 1, value}; }
Row address(std::int64_t slot, std::int64_t row, std::int64_t byte, std::int64_t divisor = 1,
            std::int64_t other = 0) {
    return {1, 8, divisor, 0, slot, row, byte, other};
}
Row word(std::int64_t index, std::int64_t other = 0) { return {2, 8, 4, index, 0, 0, 0, other}; }
Row pitch(std::int64_t bytes, std::int64_t slot, std::int64_t divisor = 1, std::int64_t value = 0) {
    return {3, bytes, divisor, value, slot, 0, 0, 0, 2};
}
Row tensor(std::int64_t slot, std::int64_t rows, std::int64_t cols, std::int64_t row = 0) {
    return {4, kMapBytes, 16, 0, slot, row, 0, 0, 2, rows, cols, 64, 32, 9, 3, 0};
}

std::vector<std::int64_t> fields(const std::vector<Row>& rows) {
    std::vector<std::int64_t> all;
    for (const Row& row : rows) all.insert(all.end(), row.begin(), row.end());
    return all;
}

// A plan of two segments and slots: 0 the caller's, 1 in the own window, 2 the caller's.
struct Bench {
    explicit Bench(int segments = 2, Rows of = Rows().on(0, 0).step(0).copy({0}, {1}, 2, 8))
        : rows(std::move(of)) {
        const std::vector<GpuAddress> words{0x1000, 0x9000}, data{0x100000, 0x200000};
        program =
            std::make_unique<GpuProgram>(std::make_shared<GpuRank>(gpu, group, 0),
                                         std::make_shared<GpuWindow>(words, data, kDataBytes),
                                         Binding{0, rows.fields(), windows, segments, 3, 3}, 7);
    }

    void set(const std::vector<Row>& parameters, int segment = 0, int mark = -1,
             KernelLaunch launch = {kKernel, {3, 1, 1}, 128, 4096}) {
        const auto numbers = fields(parameters);
        const LaunchBinding binding{launch, numbers};
        program->set_launches(segment, 1, mark, std::span(&binding, 1));
    }
    void call(int copy, bool traced = false) {
        program->call(copy, kStream, traced, addresses, pitches);
    }

    std::shared_ptr<FakeGpu> gpu = std::make_shared<FakeGpu>();
    std::shared_ptr<Group> group = std::make_shared<Group>(1, 5.0, nullptr);
    Rows rows;
    std::vector<std::int64_t> windows{1, 0, 512, kWindowPitch};
    std::unique_ptr<GpuProgram> program;
    std::vector<std::uint64_t> addresses{0x40000, 0, 0x50000};
    std::vector<std::int64_t> pitches{96, 0, 64};
};

}  // namespace

TEST(parameters_come_from_the_slots_and_words_of_the_call) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {4, 128, 8, 8, 8, 4, 8, 1};
    bench.set({constant(4, -3), tensor(1, 100, 30, 2), address(0, 3, 6), address(1, 1, 4, 4, 1),
               word(9), pitch(4, 0), pitch(8, 1), constant(1, 1), pitch(0, 2, 1, 32)});
    for (const int copy : {0, 1}) {
        bench.call(copy);
        const FakeGpu& gpu = *bench.gpu;
        CHECK_EQ(gpu.last<std::int32_t>(0), -3);
        const auto box = gpu.last<TensorBox>(1);
        const GpuAddress data = copy == 0 ? 0x100000 : 0x200000;
        const GpuAddress other = copy == 0 ? 0x200000 : 0x100000;
        CHECK((box == TensorBox{data + 512 + 2 * kWindowPitch, kWindowPitch, 100, 30, 64, 32, 2, 9,
                                3, 0}));
        CHECK_EQ(gpu.last<GpuAddress>(2), GpuAddress{0x40000 + 3 * 96 + 6});
        CHECK_EQ(gpu.last<GpuAddress>(3), other + 512 + kWindowPitch + 4);
        CHECK_EQ(gpu.last<GpuAddress>(4), GpuAddress{copy == 0 ? 0x1024U : 0x9024U});
        CHECK_EQ(gpu.last<std::int32_t>(5), 48);
        CHECK_EQ(gpu.last<std::int64_t>(6), kWindowPitch / 2);
        CHECK_EQ(static_cast<int>(gpu.last<std::uint8_t>(7)), 1);
        CHECK_EQ(gpu.launched.back().launch.grid[0], 3U);
        CHECK_EQ(gpu.launched.back().launch.threads, 128U);
        CHECK_EQ(gpu.launched.back().launch.shared_bytes, 4096U);
        CHECK_EQ(gpu.launched.back().stream, kStream);
    }
    CHECK_EQ(bench.gpu->launched.size(), 2U);
}

TEST(a_call_with_addresses_seen_before_encodes_nothing) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {128, 128};
    bench.set({tensor(0, 10, 20), tensor(1, 100, 30)});
    bench.call(0);
    CHECK_EQ(bench.gpu->encoded, 2U);
    bench.call(0);
    CHECK_EQ(bench.gpu->encoded, 2U);
    bench.call(1);  // the window's other copy
    CHECK_EQ(bench.gpu->encoded, 3U);
    bench.pitches[0] = 112;
    bench.call(1);
    CHECK_EQ(bench.gpu->encoded, 4U);
    bench.addresses[0] += 16;
    bench.call(0);
    CHECK_EQ(bench.gpu->encoded, 5U);
    bench.addresses[0] -= 16;
    bench.pitches[0] = 96;
    bench.call(1);
    CHECK_EQ(bench.gpu->encoded, 5U);
    // More than the cache holds: they are encoded again, correctly.
    for (int i = 0; i < 3000; ++i) {
        bench.addresses[0] += 16;
        bench.call(0);
        CHECK_EQ(bench.gpu->last<TensorBox>(0).address, bench.addresses[0]);
    }
}

TEST(launches_stand_behind_the_rows_of_their_segment) {
    Bench bench(3);
    bench.gpu->kernels[kKernel] = {4};
    bench.set({constant(4, 1)}, 0, 2);
    bench.set({constant(4, 2)}, 1);
    bench.call(0);
    // fork, copy of segment 0, launch, mark, launch, join, end
    CHECK((bench.gpu->told == std::vector<std::string>{"record", "copy", "launch", "record",
                                                       "launch", "record", "record"}));
    bench.gpu->told.clear();
    bench.program->start(1, kStream, false, bench.addresses, bench.pitches);
    bench.program->submit(0);
    bench.program->launch(0);
    bench.program->submit(1);  // what is launched here is left to the caller
    bench.program->submit(2);
    bench.program->finish();
    CHECK((bench.gpu->told ==
           std::vector<std::string>{"record", "copy", "launch", "record", "record", "record"}));
    bench.call(0, true);
    const auto times = bench.program->times();
    CHECK(times[1].start_ns != 0);  // both segments take the time of step 1
    CHECK(times[2].start_ns == 0);
}

TEST(what_marks_the_end_of_a_kernel_that_waits_stands_behind_other_lanes_rows) {
    Bench bench(2, Rows()
                       .on(0, kInline)
                       .step(0)
                       .expect(0, data_word(0, 0))
                       .on(1, 0)
                       .step(1)
                       .copy({0}, {1}, 2, 8)
                       .on(1, 1)
                       .step(2)
                       .after(0)
                       .raise(0, data_word(0, 1)));
    bench.gpu->kernels[kKernel] = {4};
    const std::vector<Row> parameters{constant(4, 1)};
    const auto numbers = fields(parameters);
    const LaunchBinding binding{{kKernel, {3, 1, 1}, 128, 4096}, numbers};
    bench.program->set_launches(0, 0, 0, std::span(&binding, 1));
    bench.call(0);
    // fork, set the watchdog's word, launch, copy, mark, raise, clear the watchdog's word, joins,
    // end
    const std::vector<std::string> wanted{"record", "words", "launch", "copy",   "record",
                                          "words",  "words", "record", "record", "record"};
    CHECK(bench.gpu->told == wanted);
    bench.gpu->told.clear();
    bench.call(1, true);
    const auto& told = bench.gpu->told;
    const auto launch = std::ranges::find(told, "launch");
    CHECK(told.end() - launch > 2);
    CHECK(*(launch + 1) == "record" && *(launch + 2) == "copy");  // it begins
    CHECK(bench.program->times()[0].end_ns != 0);
}

TEST(a_lane_waits_once_for_a_step) {
    Bench bench(1, Rows()
                       .on(0, 0)
                       .step(0)
                       .copy({0}, {1}, 2, 8)
                       .on(0, 1)
                       .step(1)
                       .after(0)
                       .raise(0, data_word(0, 1))
                       .step(2)
                       .after(0)
                       .raise(0, data_word(0, 2)));
    bench.call(0);
    // both lanes for the call's begin, lane 1 for the copy, the caller for both lanes
    CHECK(bench.gpu->waited.size() == 5);
    const auto words = std::ranges::count(bench.gpu->told, "words");
    CHECK(words == 1);
}

TEST(a_call_is_made_again_where_nothing_needs_a_second_look) {
    Bench bench;
    FakeGpu& gpu = *bench.gpu;
    const auto again = [&] {
        return bench.program->call_prepared(1, kStream, bench.addresses, bench.pitches);
    };
    CHECK(!again());  // there are no launches yet
    CHECK(!bench.program->follow(kStream));
    gpu.kernels[kKernel] = {8};
    bench.set({address(0, 3, 0, 16)});
    bench.call(0);
    const std::vector<std::string> wanted = gpu.told;
    gpu.told.clear();
    bench.addresses[0] += 16;
    const auto before = gpu.waited.size();
    CHECK(again());
    const auto waits = gpu.waited.size() - before;  // of a call
    CHECK(gpu.told == wanted);                      // what any call tells the device
    CHECK_EQ(gpu.last<GpuAddress>(0), GpuAddress{0x40010 + 3 * 96});
    gpu.told.clear();
    bench.addresses[0] += 8;
    CHECK(!again());  // the kernel is compiled for another address
    bench.addresses[0] -= 8;
    gpu.graph = true;
    CHECK(!again());  // a graph's windows are kept, which is the caller's to do
    CHECK(!bench.program->follow(kStream));
    gpu.graph = false;
    gpu.waited.clear();
    CHECK(bench.program->follow(kStream));  // work before the call is behind the last call, too
    CHECK_EQ(gpu.waited.size(), std::size_t{1});
    CHECK(bench.program->call_prepared(1, kStream, bench.addresses, bench.pitches, true));
    CHECK_EQ(gpu.waited.size(), waits);  // the stream does not wait a second time
    gpu.told.clear();
    bench.program->end(kStream);
    CHECK(gpu.told == std::vector<std::string>{"record"});  // and without a call behind it
    CHECK(again());
    gpu.told.clear();
    bench.group->fail(0);
    CHECK(!again());
    CHECK(!bench.program->follow(kStream));
    CHECK(gpu.told.empty());
    bench.addresses.pop_back();
    CHECK(!again());
}

TEST(a_step_without_launches_is_one) {
    Bench bench;
    bench.program->set_launches(0, 1, -1, {});
    bench.call(0);
    CHECK(bench.gpu->launched.empty());
}

TEST(launches_are_refused_where_they_do_not_fit) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {8, 4, 128};
    bench.set({address(0, 1, 0, 32), pitch(4, 2, 16), tensor(0, 4, 40)});
    const auto fits = [&] { return bench.program->fits(bench.addresses, bench.pitches); };
    CHECK(fits());
    const auto unfit = [&](auto& numbers, std::size_t slot, auto value) {
        const auto before = numbers[slot];
        numbers[slot] = value;
        const bool found = fits();
        CHECK_THROWS(std::invalid_argument, "not for matrices of these addresses", bench.call(0));
        numbers[slot] = before;
        return !found;
    };
    CHECK(unfit(bench.addresses, 0, 0x40010ULL));  // 16 divides it, 32 does not
    CHECK(unfit(bench.addresses, 0, 0ULL));
    CHECK(unfit(bench.pitches, 0, 64LL));  // less than a row
    CHECK(unfit(bench.pitches, 0, 104LL));
    CHECK(unfit(bench.pitches, 2, 48LL));                   // 24 elements
    CHECK(unfit(bench.pitches, 2, 65LL));                   // half an element
    CHECK(unfit(bench.pitches, 2, std::int64_t{1} << 33));  // no 32 bits
    CHECK(bench.gpu->launched.empty());
    CHECK_THROWS(std::invalid_argument, "3 slots, and was given 0 addresses",
                 static_cast<void>(bench.program->fits({}, {})));
    bench.gpu->kernels[kKernel] = {};
    bench.set({pitch(0, 2, 1, 33)});
    CHECK(!fits());
    bench.set({pitch(0, 2, 1, 32)});  // in place of the one before
    CHECK(fits());
    bench.call(0);
}

TEST(parameters_are_held_against_the_driver_and_the_window) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {4, 8};
    CHECK_THROWS(std::invalid_argument, "of 4 4 bytes, and the driver says that it takes 4 8",
                 bench.set({constant(4, 1), constant(4, 1)}));
    CHECK_THROWS(std::invalid_argument, "takes 4 8", bench.set({constant(4, 1)}));
    bench.set({constant(4, 1), constant(8, 1)});
    bench.gpu->kernels[kKernel] = {128};
    CHECK_THROWS(std::invalid_argument, "bytes of a window copy", bench.set({tensor(1, 300, 30)}));
    CHECK_THROWS(std::invalid_argument, "where they lie in the window",
                 bench.set({tensor(1, 10, 130)}));  // its rows are shorter than that
    bench.gpu->kernels[kKernel] = {8};
    CHECK_THROWS(std::invalid_argument, "where they lie in the window",
                 bench.set({address(1, 0, 8, 16)}));
    CHECK_THROWS(std::invalid_argument, "bytes of a window copy",
                 bench.set({address(1, 255, 0, 16)}));
    const auto refused = [&](const Row& row, const char* field) {
        const std::string text =
            thrown<std::invalid_argument>(__FILE__, __LINE__, [&] { bench.set({row}); });
        if (text.find("parameters[0]: field " + std::string(field)) == std::string::npos) {
            give_up(__FILE__, __LINE__, text);
        }
    };
    refused({6, 8, 1}, "0");
    refused(constant(3, 1), "1");
    refused({1, 4, 1}, "1");
    refused({5, 2, 1}, "1");
    refused(pitch(2, 0), "1");
    refused(address(0, 0, 0, 0), "2");
    refused(word(kWordsPerCopy), "3");
    refused(address(3, 0, 0), "4");
    refused(pitch(4, -1), "4");
    refused(address(0, -1, 0), "5");
    refused(address(0, 0, 0, 1, 2), "7");
    refused({3, 4, 1, 0, 0, 0, 0, 0, 0}, "8");
    refused(tensor(0, 0, 5), "9");
    refused({4, kMapBytes, 16, 0, 0, 0, 0, 0, 2, 5, 5, 257, 32, 9, 3, 0}, "11");
    const std::vector<std::int64_t> odd(kParameterFields - 1);
    const LaunchBinding binding{{kKernel, {1, 1, 1}, 32, 0}, odd};
    CHECK_THROWS(std::invalid_argument, "rows of 16 numbers",
                 bench.program->set_launches(0, 0, -1, std::span(&binding, 1)));
    CHECK_THROWS(std::invalid_argument, "one block",
                 bench.set({constant(8, 1)}, 0, -1, {kKernel, {1, 0, 1}, 32, 0}));
    CHECK_THROWS(std::invalid_argument, "no handle",
                 bench.set({constant(8, 1)}, 0, -1, {nullptr, {1, 1, 1}, 32, 0}));
}

TEST(what_the_gpu_cannot_do_is_refused_before_a_call) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {128};
    bench.gpu->has = {};
    CHECK_THROWS(std::invalid_argument, "has no tensor maps; pass addresses",
                 bench.set({tensor(1, 100, 30)}));
    CHECK_THROWS(std::invalid_argument, "before the previous one ends",
                 bench.set({constant(4, 1)}, 0, -1, {kKernel, {3, 1, 1}, 128, 0, true}));
    const auto rank = std::make_shared<GpuRank>(bench.gpu, bench.group, 0);
    const auto window =
        std::make_shared<GpuWindow>(std::vector<GpuAddress>{0x1000, 0x9000},
                                    std::vector<GpuAddress>{0x100000, 0x200000}, kDataBytes);
    const auto bind = [&](const Rows& rows) {
        GpuProgram(rank, window, Binding{0, rows.fields(), {}, 1, 1, 1}, 7);
    };
    CHECK_THROWS(std::invalid_argument, "streams wait for no words; a kernel can",
                 bind(Rows().on(0, 0).step(0).wait(0, 1, 1)));
    CHECK_THROWS(std::invalid_argument, "streams store no words; copy them",
                 bind(Rows().on(0, 0).step(0).clear(0, 1)));
}

TEST(launches_come_in_their_season) {
    Bench bench(3);
    bench.gpu->kernels[kKernel] = {4};
    CHECK_THROWS(std::invalid_argument, "segment is 2, not 0 to 1", bench.set({constant(4, 1)}, 2));
    CHECK_THROWS(std::invalid_argument, "segment is -1", bench.set({constant(4, 1)}, -1));
    CHECK_THROWS(std::invalid_argument, "mark 3", bench.set({constant(4, 1)}, 0, 3));
    bench.set({constant(4, 1)});
    CHECK_THROWS(std::runtime_error, "segment 1 has no launches", bench.call(0));
    CHECK_THROWS(std::runtime_error, "no call runs", bench.program->launch(0));
    bench.program->start(0, kStream, false, bench.addresses, bench.pitches);
    CHECK_THROWS(std::invalid_argument, "segment is 0, and the last one submitted -1",
                 bench.program->launch(0));
    CHECK_THROWS(std::runtime_error, "a call runs", bench.set({constant(4, 1)}));
    bench.program->submit(0);
    bench.program->launch(0);
    bench.program->submit(1);
    CHECK_THROWS(std::invalid_argument, "segment 1 has no launches", bench.program->launch(1));
    bench.program->submit(2);
    bench.program->finish();
    CHECK_EQ(bench.gpu->launched.size(), 1U);

    bench.set({constant(4, 1)}, 1);
    bench.gpu->refuses = true;
    CHECK_THROWS(GpuError, "it refuses", bench.call(0));
    bench.program->abandon();
    CHECK_THROWS(std::runtime_error, "fail", bench.call(0));
}

TEST(a_capture_that_loses_launches_is_refused) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {4};
    bench.set({constant(4, 1)});
    bench.gpu->graph = true;
    bench.call(0);
    bench.gpu->drops = true;
    CHECK_THROWS(GpuError, "0 kernels of the 1 that were submitted", bench.call(0));
}

TEST(a_captured_call_looks_at_its_own_nodes_alone) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {4};
    bench.set({constant(4, 1)});
    bench.gpu->graph = true;
    bench.call(0);
    const std::size_t of_one_call = bench.gpu->types_asked;
    for (int number = 1; number < 10; ++number) bench.call(0);
    CHECK_EQ(bench.gpu->types_asked, 10 * of_one_call);
}

TEST(captured_calls_in_branches_run_one_after_another) {
    Bench bench;
    bench.gpu->kernels[kKernel] = {4};
    bench.set({constant(4, 1)});
    bench.gpu->graph = true;
    const auto other = reinterpret_cast<GpuStream>(6);
    const auto waits = [&](GpuStream stream) {
        bench.gpu->waited.clear();
        bench.program->call(0, stream, false, bench.addresses, bench.pitches);
        return std::count(bench.gpu->waited.begin(), bench.gpu->waited.end(), stream);
    };
    const auto alone = waits(kStream);
    CHECK_EQ(waits(kStream), alone + 1);  // a handle may be that of another stream now
    CHECK_EQ(waits(other), alone + 1);
    CHECK_EQ(waits(kStream), alone + 1);
    bench.gpu->capture_id = 2;  // the last call is in another graph
    CHECK_EQ(waits(other), alone);
}
