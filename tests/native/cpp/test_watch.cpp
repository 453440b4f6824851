// The watchdog's failure reports and writes when a call waits forever, their end, and that a read
// that the driver blocks does not block others.
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/clock.hpp"
#include "ficco/gpu_watch.hpp"
#include "ficco/op.hpp"
#include "ficco/shared.hpp"
#include "ficco/thread.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr GpuAddress kWords = 1 << 16;  // of the own window's first copy
constexpr GpuAddress kData = 1 << 20;
constexpr GpuAddress kStopWord = 12;
constexpr int kStep = 3;
constexpr int kMissing = kEnteredWords + 1;  // the place of the word that does not come
constexpr std::uint32_t kDigest = 77;
constexpr double kAnswersWithinS = 0.05;  // where reads are held up
constexpr double kPatientS = 2.0;         // else: the reader's thread may be late on a busy host

// Its memory holds 0. A read may be held up inside of the call, until it is let go or the word that
// the stream waits for is written.
class FilledGpu final : public FakeGpu {
  public:
    void words(std::span<const WordCommand> commands, GpuStream) override {
        for (const WordCommand& command : commands) {
            if (command.address == kWords + 4 * kMissing && lets_go) holds_reads = false;
            if (command.address == kStopWord) stuck = true;
        }
    }
    void fill(GpuAddress address, unsigned char, std::size_t, GpuStream) override {
        if (address >= kData) ++fills;
    }
    void read(void* host, GpuAddress, std::size_t bytes, GpuStream) override {
        ++reads;
        while (holds_reads) sleep_until_ns(now_ns() + 100'000);
        if (refuses_reads) throw GpuError("it cannot be read");
        std::memset(host, 0, bytes);
        ++reads_ended;
    }

    bool idle(GpuStream) override { return !stuck; }

    std::atomic<bool> stuck = false;  // at a write of the stop word
    std::atomic<bool> holds_reads = false;
    std::atomic<bool> lets_go = true;
    std::atomic<bool> refuses_reads = false;
    std::atomic<int> fills = 0;
    std::atomic<int> reads = 0;
    std::atomic<int> reads_ended = 0;
};

template <class Condition>
bool comes(const Condition& condition) {
    const std::int64_t deadline = now_ns() + 5'000'000'000;
    while (!condition() && now_ns() < deadline) sleep_until_ns(now_ns() + 1'000'000);
    return condition();
}

// A call that waits and never ends: the word of its lane stays set.
struct StuckCall {
    // `set` may set the GPU before it is used.
    explicit StuckCall(
        const std::function<void(FilledGpu&)>& set = [](FilledGpu&) {},
        const std::shared_ptr<Group>& of = nullptr) {
        set(*gpu);
        if (of) group = of;
        const double answers_within_s = gpu->holds_reads ? kAnswersWithinS : kPatientS;
        watch = std::make_unique<GpuWatch>(gpu, group, 0, answers_within_s);
        const int number =
            watch->add({window, {{kInline, kStep, kMissing, kDigest, 0}, {kInline, 4, 6, 1, 0}}});
        auto* lane = reinterpret_cast<std::uint32_t*>(watch->lane_word(kInline));
        std::atomic_ref(*lane).store(GpuWatch::mark_of(number, 0));
    }
    ~StuckCall() { gpu->holds_reads = false; }

    std::shared_ptr<FilledGpu> gpu = std::make_shared<FilledGpu>();
    std::shared_ptr<Group> group = std::make_shared<Group>(2, 0.02, nullptr);
    std::shared_ptr<const GpuWindow> window = std::make_shared<const GpuWindow>(
        std::vector<GpuAddress>{kWords, 2 * kWords, 3 * kWords, 4 * kWords},
        std::vector<GpuAddress>{kData, kData + 64, kData + 128, kData + 192}, 64);
    std::unique_ptr<GpuWatch> watch;
};

void hold_for_ever(FilledGpu& gpu) {
    gpu.holds_reads = true;
    gpu.lets_go = false;
}

// A kernel waits by itself, on a GPU whose streams store no words: two plans await the same word,
// and the first one's call waits.
struct WaitingKernel {
    WaitingKernel() {
        gpu->has = {};
        watch = std::make_unique<GpuWatch>(gpu, group, 0, kAnswersWithinS);
        const int number = watch->add({window, {{kInline, kStep, kMissing, 1, 0}}, true});
        watch->add({window, {{kInline, 9, kMissing, 1, 0}}, true});
        lane().store(GpuWatch::mark_of(number, 0));
    }
    static std::atomic_ref<std::uint32_t> at(GpuAddress word) {
        return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word));
    }
    std::atomic_ref<std::uint32_t> lane() const { return at(watch->lane_word(kInline)); }
    std::atomic_ref<std::uint32_t> stop() const { return at(watch->stop_word()); }
    std::atomic_ref<std::uint32_t> missed() const { return at(watch->missed_word()); }
    bool calls_the_driver() const { return gpu->reads > 0 || gpu->fills > 0; }

    std::shared_ptr<FilledGpu> gpu = std::make_shared<FilledGpu>();
    std::shared_ptr<Group> group = std::make_shared<Group>(2, 0.2, nullptr);
    std::shared_ptr<const GpuWindow> window = std::make_shared<const GpuWindow>(
        std::vector<GpuAddress>{kWords, 2 * kWords, 3 * kWords, 4 * kWords},
        std::vector<GpuAddress>{kData, kData + 64, kData + 128, kData + 192}, 64);
    std::unique_ptr<GpuWatch> watch;
};

}  // namespace

TEST(a_window_that_is_forgotten_is_written_no_more) {
    StuckCall stuck;
    const auto& gpu = stuck.gpu;
    CHECK(comes([&] { return stuck.group->failed() && gpu->fills > 0; }));
    const int before = gpu->fills;
    CHECK(comes([&] { return gpu->fills > before; }));  // again and again
    stuck.watch->forget(*stuck.window);
    const int then = gpu->fills;
    sleep_until_ns(now_ns() + 50'000'000);
    CHECK_EQ(gpu->fills.load(), then);
}

TEST(a_read_that_comes_in_time_names_the_word) {
    StuckCall stuck;
    CHECK(comes([&] { return stuck.group->failed(); }));
    const Failure failure = stuck.group->failure().value();
    CHECK(failure.kind == Failure::Kind::timeout);
    CHECK_EQ(failure.step, kStep);
    CHECK_EQ(failure.word_rank, 0);
    CHECK_EQ(failure.word_index, kMissing);
    CHECK_EQ(failure.expected, kDigest);
    CHECK_EQ(stuck.gpu->reads.load(), 1);
}

TEST(a_rank_that_has_not_entered_is_told_of_before_data) {
    StuckCall stuck;
    const int number =
        stuck.watch->add({stuck.window, {{kInline, 7, 5, 1, 0}, {0, kStep, kMissing, kDigest, 0}}});
    for (const int lane : {kInline, 0}) {  // the data's lane is looked at first
        auto* word = reinterpret_cast<std::uint32_t*>(stuck.watch->lane_word(lane));
        std::atomic_ref(*word).store(GpuWatch::mark_of(number, 0));
    }
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK_EQ(stuck.group->failure()->step, kStep);
    CHECK_EQ(stuck.group->failure()->word_index, kMissing);
}

TEST(a_call_that_waits_for_a_rank_that_has_left_fails_soon) {
    const int memory = create_memory(3, 0);
    std::vector<std::shared_ptr<Group>> groups;
    for (int rank = 0; rank < 3; ++rank) {
        groups.push_back(std::make_shared<Group>(Membership{memory, 3, rank, 0}, 60.0, nullptr));
    }
    close(memory);
    const StuckCall stuck([](FilledGpu&) {}, groups[0]);
    groups[2]->close();  // which is not waited for
    sleep_until_ns(now_ns() + 1'300'000'000);
    CHECK(!stuck.group->failed());
    groups[1]->close();
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK(stuck.group->failure()->kind == Failure::Kind::timeout);
    CHECK_EQ(stuck.group->failure()->step, kStep);
    CHECK_EQ(stuck.group->failure()->word_index, kMissing);
}

TEST(a_call_waits_longer_for_a_rank_that_makes_its_call_ready) {
    StuckCall stuck([](FilledGpu&) {}, std::make_shared<Group>(2, 0.2, nullptr));
    stuck.group->set_preparing(1, true);
    stuck.group->set_preparing(1, true);
    sleep_until_ns(now_ns() + 800'000'000);
    CHECK(!stuck.group->failed());
    stuck.group->set_preparing(1, false);
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK_EQ(stuck.group->failure()->word_index, kMissing);
}

TEST(a_rank_that_prepares_for_ever_suspends_a_timeout_for_ten_of_them) {
    StuckCall stuck([](FilledGpu&) {}, std::make_shared<Group>(2, 0.1, nullptr));
    stuck.group->set_preparing(1, true);
    const std::int64_t start = now_ns();
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK_LE(1'000'000'000, now_ns() - start);
    CHECK(stuck.group->state(1).preparing);
    CHECK_EQ(stuck.group->failure()->word_index, kMissing);
}

TEST(a_rank_that_has_left_prepares_nothing) {
    const int memory = create_memory(3, 0);
    const auto join = [&](int rank) {
        return std::make_shared<Group>(Membership{memory, 3, rank, 0}, 60.0, nullptr);
    };
    const auto first = join(0);
    const auto second = join(1);
    const auto third = join(2);
    close(memory);
    third->set_preparing(2, true);
    third->set_preparing(2, false);
    CHECK(!first->someone_prepares());
    second->set_preparing(1, true);
    CHECK(first->someone_prepares());
    second->close();  // in the middle of it
    CHECK(!first->someone_prepares());
}

TEST(the_stop_word_is_known_while_the_device_does_not_answer) {
    StuckCall stuck;
    stuck.watch->set_stop_word(kStopWord);
    CHECK(comes([&] { return stuck.gpu->stuck.load(); }));
    for (int look = 0; look < 20; ++look) {  // the watchdog waits for kPatientS
        const std::int64_t start = now_ns();
        CHECK_EQ(stuck.watch->stop_word(), kStopWord);
        stuck.watch->remove(stuck.watch->add({stuck.window, {}}));
        CHECK_LE(now_ns() - start, static_cast<std::int64_t>(kPatientS * 0.5e9));
        sleep_until_ns(now_ns() + 10'000'000);
    }
}

TEST(a_kernel_that_waits_for_a_rank_that_has_left_fails_soon) {
    const int memory = create_memory(2, 0);
    const auto first = std::make_shared<Group>(Membership{memory, 2, 0, 0}, 60.0, nullptr);
    {
        const Group second(Membership{memory, 2, 1, 0}, 60.0, nullptr);
    }
    close(memory);
    const StuckCall stuck([](FilledGpu&) {}, first);
    const int number =
        stuck.watch->add({stuck.window, {{AwaitedWord::kMissed, 9, kMissing, kDigest, 0}}});
    auto* word = reinterpret_cast<std::uint32_t*>(stuck.watch->lane_word(kInline));
    std::atomic_ref(*word).store(GpuWatch::mark_of(number, 0));
    CHECK(comes([&] { return first->failed(); }));
    CHECK_EQ(first->failure()->step, 9);
}

TEST(data_that_do_not_come_are_told_of) {
    StuckCall stuck;
    const int number = stuck.watch->add({stuck.window, {{kInline, 7, 5, 1, 0}}});
    auto* word = reinterpret_cast<std::uint32_t*>(stuck.watch->lane_word(kInline));
    std::atomic_ref(*word).store(GpuWatch::mark_of(number, 0));
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK_EQ(stuck.group->failure()->step, 7);
    CHECK_EQ(stuck.group->failure()->word_index, 5);
}

TEST(a_read_that_is_held_up_keeps_nobody_from_being_let_go) {
    StuckCall stuck([](FilledGpu& gpu) { gpu.holds_reads = true; });
    CHECK(comes([&] { return stuck.group->failed(); }));
    const Failure failure = stuck.group->failure().value();
    CHECK(failure.kind == Failure::Kind::timeout);
    CHECK_EQ(failure.step, kStep);
    CHECK_EQ(failure.word_rank, 0);
    CHECK_EQ(failure.word_index, -1);
    CHECK(comes([&] { return stuck.gpu->fills > 0 && stuck.gpu->reads_ended == 1; }));
    stuck.watch->forget(*stuck.window);
}

TEST(a_read_that_is_refused_stops_the_group) {
    StuckCall stuck([](FilledGpu& gpu) { gpu.refuses_reads = true; });
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK(stuck.group->failure()->kind == Failure::Kind::stopped);
    CHECK(comes([&] { return stuck.gpu->fills > 0; }));
}

TEST(a_window_is_not_forgotten_while_a_read_of_it_stands) {
    StuckCall stuck(hold_for_ever);
    CHECK(comes([&] { return stuck.group->failed(); }));
    CHECK_THROWS(GpuError, "still stands in the driver", stuck.watch->forget(*stuck.window));
    const int before = stuck.gpu->fills;
    CHECK(comes([&] { return stuck.gpu->fills > before; }));  // it still tries
    std::atomic<bool> forgotten = false;
    Thread thread("forgets", [&] {
        stuck.watch->forget(*stuck.window);
        CHECK_EQ(stuck.gpu->reads_ended.load(), 1);
        forgotten = true;
    });
    sleep_until_ns(now_ns() + 20'000'000);
    CHECK(!forgotten);
    stuck.gpu->holds_reads = false;
    CHECK(comes([&] { return forgotten.load(); }));
}

TEST(a_watch_ends_before_a_read_that_stands) {
    StuckCall stuck(hold_for_ever);
    CHECK(comes([&] { return stuck.group->failed(); }));
    stuck.watch.reset();
    CHECK_EQ(stuck.gpu->reads_ended.load(), 0);
    CHECK(stuck.gpu.use_count() > 1);  // what the read uses is there
    stuck.gpu->holds_reads = false;
    CHECK(comes([&] { return stuck.gpu.use_count() == 1; }));
    CHECK_EQ(stuck.gpu->reads_ended.load(), 1);
}

TEST(a_kernel_that_waits_too_long_is_stopped_and_tells) {
    const WaitingKernel waiting;
    sleep_until_ns(now_ns() + 100'000'000);
    CHECK_EQ(waiting.stop().load(), 0U);
    CHECK(comes([&] { return waiting.stop().load() == 1; }));
    waiting.missed().store(kMissing + 1);
    waiting.lane().store(0);
    CHECK(comes([&] { return waiting.group->failed(); }));
    CHECK_EQ(waiting.group->failure()->step, kStep);
    CHECK_EQ(waiting.group->failure()->word_index, kMissing);
    CHECK(comes([&] { return waiting.stop().load() == 1; }));  // for the kernels of later calls
    CHECK(!waiting.calls_the_driver());
}

TEST(a_kernel_that_does_not_answer_fails_the_group) {
    const WaitingKernel waiting;
    CHECK(comes([&] { return waiting.group->failed(); }));
    CHECK_EQ(waiting.group->failure()->step, kStep);
    CHECK_EQ(waiting.group->failure()->word_index, -1);
    CHECK(!waiting.calls_the_driver());
}

TEST(a_kernel_whose_words_come_late_is_not_a_failure) {
    const WaitingKernel waiting;
    CHECK(comes([&] { return waiting.stop().load() == 1; }));
    waiting.lane().store(0);
    CHECK(comes([&] { return waiting.stop().load() == 0; }));
    CHECK(!waiting.group->failed());
}
