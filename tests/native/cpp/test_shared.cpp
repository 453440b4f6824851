// Groups whose ranks are processes. Two group objects over one memory stand for two processes where
// that is enough; where one must die or stop, it is a child, forked before this process has
// threads.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "ficco/clock.hpp"
#include "ficco/shared.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr std::size_t kBytes = 10'000;

class Memory {
  public:
    explicit Memory(int world, std::size_t bytes = kBytes)
        : world_(world), bytes_(bytes), file_(create_memory(world, bytes)) {}
    ~Memory() { close(file_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    int file() const { return file_; }
    std::shared_ptr<Group> join(int rank, double timeout_s = 30.0, double gbps = 0.0) const {
        std::shared_ptr<Fabric> fabric;
        if (gbps > 0.0) fabric = std::make_shared<Fabric>(file_, world_, "pair", gbps);
        return std::make_shared<Group>(Membership{file_, world_, rank, bytes_}, timeout_s, fabric);
    }

  private:
    int world_;
    std::size_t bytes_;
    int file_;
};

// Three ranks, whose windows have no space for data.
struct Three {
    Three() {
        for (int rank = 0; rank < 3; ++rank) groups.push_back(memory.join(rank));
    }
    // A call that ends immediately.
    void begin(int rank, std::uint32_t digest) const {
        groups[static_cast<std::size_t>(rank)]->enter(rank, digest, 0);
        groups[static_cast<std::size_t>(rank)]->leave();
    }

    Memory memory{3, 0};
    std::vector<std::shared_ptr<Group>> groups;
};

// A process that runs `body` and then waits to be killed.
class Child {
  public:
    template <class Body>
    explicit Child(Body body) : pid_(fork()) {
        if (pid_ != 0) return;
        // A failed test leaves no child that holds its output open.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body();
        for (;;) pause();
    }
    ~Child() { end(); }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    void send(int signal) const { CHECK_EQ(kill(pid_, signal), 0); }
    void end() {
        if (pid_ == 0) return;
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        pid_ = 0;
    }

  private:
    pid_t pid_;
};

template <class Condition>
void wait_until(Condition condition) {
    const std::int64_t start = now_ns();
    while (!condition()) {
        CHECK_LE(now_ns() - start, kSoonNs);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

bool raised(const Group& group, int rank, int word) {
    return group.word(rank, 0, word).load(std::memory_order_acquire) != 0;
}

}  // namespace

// The tests that fork come first, because a sanitizer's child must not inherit threads.

TEST(a_killed_process_has_died_and_waits_for_it_end_soon) {
    const Memory memory(2);
    Child child([&] {
        const auto group = memory.join(1);
        // A rank that joins sets its own words.
        wait_until([&] { return group->state(0).presence == Presence::here; });
        Group::raise(group->word(0, 0, data_word(1, 0)), 1);
        for (;;) pause();
    });
    const auto group = memory.join(0, 60.0);
    wait_until([&] { return raised(*group, 0, data_word(1, 0)); });
    CHECK(group->state(1).presence == Presence::here);
    CHECK(group->state(1).age_s < 5.0);
    child.end();
    wait_until([&] { return group->state(1).presence == Presence::died; });

    const auto program = bound(group, 0, Rows().on(0, 0).wait(0, data_word(1, 1)), {});
    const std::int64_t start = now_ns();
    CHECK(!call(*program, 1));
    CHECK_LE(now_ns() - start, kSoonNs);
    const auto failure = group->failure();
    CHECK(failure->kind == Failure::Kind::timeout);
    CHECK_EQ(failure->rank, 0);
    CHECK_EQ(failure->word_index, data_word(1, 1));
}

TEST(a_stopped_process_beats_no_more_and_lives_on) {
    const Memory memory(2);
    const Child child([&] {
        const auto group = memory.join(1);
        for (;;) pause();
    });
    const auto group = memory.join(0);
    wait_until([&] { return group->state(1).presence == Presence::here; });
    child.send(SIGSTOP);
    wait_until([&] { return group->state(1).age_s > 0.3; });
    CHECK(group->state(1).presence == Presence::here);
    child.send(SIGCONT);
    wait_until([&] { return group->state(1).age_s < 0.2; });
}

// Processes are killed repeatedly while they begin and end transfers, often under the lock.
TEST(paced_links_outlive_processes_that_die_at_work) {
    const std::atomic<bool> never{false};
    const std::atomic<bool> always{true};
    for (int round = 0; round < 20; ++round) {
        const Memory memory(3);
        Child child([&] {
            Fabric fabric(memory.file(), 3, "port", 100.0);
            for (;;) fabric.end(fabric.begin(1, 2, 1000, 0, never), never);
        });
        Fabric fabric(memory.file(), 3, "port", 100.0);
        const std::int64_t end = now_ns() + 3'000'000 + round * 200'000;
        while (now_ns() < end) CHECK(fabric.end(fabric.begin(0, 2, 1000, 0, never), never));
        child.end();
        const std::int64_t start = now_ns();
        for (int number = 0; number < 20; ++number) {
            CHECK(fabric.end(fabric.begin(0, 2, 100'000, 0, never), never));
        }
        CHECK_LE(now_ns() - start, kSoonNs);
        CHECK(!fabric.end(fabric.begin(0, 2, 1'000'000'000'000, 0, never), always));
    }
}

TEST(a_process_stopped_at_work_does_not_keep_others_from_giving_up) {
    const std::atomic<bool> never{false};
    const std::atomic<bool> always{true};
    const Memory memory(3);
    const Child child([&] {
        Fabric fabric(memory.file(), 3, "port", 100.0);
        for (;;) fabric.end(fabric.begin(1, 2, 1000, 0, never), never);
    });
    Fabric fabric(memory.file(), 3, "port", 100.0);
    for (int round = 0; round < 5; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        child.send(SIGSTOP);
        const std::int64_t start = now_ns();
        fabric.end(fabric.begin(0, 2, 1'000'000'000'000, 0, always), always);
        CHECK_LE(now_ns() - start, kSoonNs);
        child.send(SIGCONT);
    }
}

TEST(ranks_that_share_memory_send_and_signal) {
    const Memory memory(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&memory, rank] {
            const auto group = memory.join(rank);
            wait_until([&] { return group->state(rank ^ 1).presence == Presence::here; });
            const int peer = rank ^ 1;
            std::vector<std::uint8_t> given(kBytes, static_cast<std::uint8_t>(rank + 1));
            std::vector<std::uint8_t> got(kBytes);
            Rows rows;
            rows.on(0, 0).wait(rank, free_word(peer)).clear(rank, free_word(peer));
            rows.copy({0}, {1}, 1, kBytes).raise(peer, data_word(rank, 0));
            rows.on(0, 1).wait(rank, data_word(peer, 0)).copy({2}, {3}, 1, kBytes);
            rows.clear(rank, data_word(peer, 0)).raise(peer, free_word(rank));
            const std::vector<std::int64_t> windows{1, peer, 0, 0, 2, rank, 0, 0};
            const auto program = bound(group, rank, rows, {.slots = 4}, windows);
            Slots slots(4);
            slots.set(0, given.data(), 0);
            slots.set(3, got.data(), 0);
            for (int turn = 0; turn < 200; ++turn) {
                std::memset(got.data(), 0, kBytes);
                CHECK(call(*program, 1, turn % 2, 5, slots));
                for (const std::uint8_t byte : got) CHECK_EQ(int{byte}, peer + 1);
            }
            CHECK_EQ(group->state(rank).calls, 200U);
            CHECK_EQ(group->state(rank).digest, 5U);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST(the_first_failure_is_that_of_all_ranks) {
    const Memory memory(3);
    std::vector<std::shared_ptr<Group>> groups;
    for (int rank = 0; rank < 3; ++rank) groups.push_back(memory.join(rank, 0.1 + rank * 100));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&groups, rank] {
            const auto& group = groups[static_cast<std::size_t>(rank)];
            const auto program =
                bound(group, rank, Rows().on(0, 0).wait(rank, data_word((rank + 1) % 3, 7)), {});
            CHECK(!call(*program, 1));
        });
    }
    for (std::thread& thread : threads) thread.join();
    groups[2]->fail(2);
    for (const auto& group : groups) {
        CHECK_EQ(group->failure()->rank, 0);
        CHECK_EQ(group->failure()->word_index, data_word(1, 7));
    }
}

TEST(who_fails_at_once_tells_one_failure) {
    for (int round = 0; round < 50; ++round) {
        const Memory memory(2, 0);
        const auto first = memory.join(0);
        const auto second = memory.join(1);
        std::thread other([&] { second->fail(1); });
        first->fail(0);
        other.join();
        CHECK_EQ(first->failure()->rank, second->failure()->rank);
        CHECK(first->failed() && second->failed());
    }
}

TEST(memory_of_another_layout_is_refused) {
    CHECK(Control::magic_of({1, 2, 3}) != Control::magic_of({1, 2, 4}));
    CHECK(Control::magic_of({1, 2, 3}) != Control::magic_of({2, 1, 3}));
    const Memory memory(2);
    const Mapping head(memory.file(), 0, sizeof(std::uint64_t));
    auto& magic = *reinterpret_cast<std::uint64_t*>(head.data());
    magic ^= 1;  // as by a build whose parts have other sizes
    CHECK_THROWS(std::invalid_argument, "made by this build of ficco", memory.join(0));
    magic ^= 1;
    memory.join(0);
}

TEST(calls_that_differ_fail_the_group_soon) {
    const Three three;
    const auto& groups = three.groups;
    const auto begin = [&](int rank, std::uint32_t digest) { three.begin(rank, digest); };
    for (std::uint32_t call = 0; call < 600; ++call) {  // the memory of calls goes round
        for (int rank = 0; rank < 3; ++rank) begin(rank, 7 + call);
    }
    begin(2, 11);
    begin(2, 12);
    begin(0, 11);  // one alone is ahead
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    CHECK(!groups[1]->failed());
    begin(1, 11);
    begin(1, 13);
    wait_until([&] { return groups[0]->failed(); });
    const auto failure = *groups[0]->failure();
    CHECK(failure.kind == Failure::Kind::differs);
    CHECK_EQ(failure.rank, 2);
    CHECK_EQ(failure.word_rank, 1);
    CHECK_EQ(failure.found, 13U);
    CHECK_EQ(failure.expected, 12U);
}

TEST(a_call_that_one_rank_refuses_fails_the_group_with_its_reason) {
    const Three three;
    const auto& groups = three.groups;
    const auto begin = [&](int rank) { three.begin(rank, 7); };
    const auto refuse = [&](int rank, std::string_view reason) {
        groups[static_cast<std::size_t>(rank)]->refuse(rank, reason);
    };
    const auto is_well_for = [&](int ms) {
        std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        return !groups[1]->failed();
    };
    for (int rank = 0; rank < 3; ++rank) begin(rank);
    for (int rank = 0; rank < 3; ++rank) refuse(rank, "x is sparse");  // all alike
    for (const int rank : {0, 2}) begin(rank);
    CHECK(is_well_for(800));  // rank 1 is late
    begin(1);
    refuse(1, "w is None");
    CHECK(groups[0]->refuses_next(0, 1) && !groups[1]->refuses_next(1, 0));
    CHECK(is_well_for(800));  // nobody has begun what it refused
    for (const int rank : {0, 1, 2}) begin(rank);
    CHECK(is_well_for(800));  // and it has made it after all
    for (int rank = 0; rank < 3; ++rank) {
        for (int turn = 0; turn < 5; ++turn) refuse(rank, "x is sparse");
    }
    const std::string longest(2000, 'n');
    refuse(1, longest);
    refuse(1, "w is None");
    for (int call = 0; call < 3; ++call) begin(2);  // as a GPU's host, which runs ahead
    wait_until([&] { return groups[0]->failed(); });
    const auto failure = *groups[0]->failure();
    CHECK(failure.kind == Failure::Kind::refused);
    CHECK_EQ(failure.rank, 1);
    CHECK_EQ(failure.word_rank, 2);
    CHECK_EQ(failure.found, 3U);
    const std::string reason = groups[0]->refusal(2, 1);
    CHECK(longest.starts_with(reason) && reason.size() > 500);
    CHECK_EQ(groups[0]->last_refusal(1), "w is None");
}

TEST(a_call_that_a_rank_had_not_begun_when_it_left_fails_the_group) {
    const Three three;
    const auto& groups = three.groups;
    const auto begin = [&](int rank) { three.begin(rank, 7); };
    for (int rank = 0; rank < 3; ++rank) begin(rank);
    begin(1);
    groups[1]->close();  // in order, behind a call that the others make later
    begin(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    begin(2);
    CHECK(!groups[0]->failed());
    begin(2);
    wait_until([&] { return groups[0]->failed(); });
    CHECK(groups[0]->failure()->kind == Failure::Kind::stopped);
    CHECK_EQ(groups[0]->failure()->rank, 1);
}

TEST(a_wait_for_a_rank_that_has_closed_ends_soon) {
    const Memory memory(3);
    const auto first = memory.join(0, 60.0);
    const auto second = memory.join(1, 60.0);
    auto third = memory.join(2, 60.0);
    Group::raise(first->word(0, 0, data_word(2, 0)), 1);
    for (int turn = 0; turn < 2; ++turn) {  // both calls that end, and not the one that fails
        third->enter(2, 0, 0);
        third->leave();
    }
    third.reset();
    // Its earlier raises are visible, and waits for another live rank continue.
    const auto met = bound(first, 0, Rows().on(0, 0).wait(0, data_word(2, 0)), {});
    CHECK(call(*met, 1));
    std::thread late([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        Group::raise(first->word(0, 0, data_word(1, 0)), 1);
    });
    const auto waits = bound(first, 0, Rows().on(0, 0).wait(0, data_word(1, 0)), {});
    CHECK(call(*waits, 1));
    late.join();
    const auto misses = bound(first, 0, Rows().on(0, 0).wait(0, entered_word(2)), {});
    const std::int64_t start = now_ns();
    CHECK(!call(*misses, 1));
    CHECK_LE(now_ns() - start, kSoonNs);
    CHECK_EQ(first->failure()->word_index, entered_word(2));
}

TEST(calls_are_compared_while_they_are_remembered_and_not_captured) {
    const Memory memory(2, 0);
    const auto control_memory = Mapping(memory.file(), 0, sizeof(Control));
    auto& control = *reinterpret_cast<Control*>(control_memory.data());
    std::uint32_t compared = 0;
    for (std::uint32_t call = 0; call < 300; ++call) control.began(0, 100 + call);
    for (std::uint32_t call = 0; call < 50; ++call) control.began(1, 1000);
    CHECK(control.difference(1, 0, compared).has_value());
    CHECK_EQ(compared, 45U);  // the first that rank 0 is not about to write over
    compared = 50;
    control.began(1, 150);
    CHECK(!control.difference(1, 0, compared).has_value());
    CHECK_EQ(compared, 51U);
    control.began(1, 3);
    control.captured();
    CHECK(!control.difference(1, 0, compared).has_value());
}

TEST(ranks_leave_by_close_or_by_their_end) {
    const Memory memory(3);
    auto first = memory.join(0);
    auto second = memory.join(1);
    CHECK(first->state(2).presence == Presence::absent);
    CHECK(first->state(1).presence == Presence::here);
    second->close();
    second->close();
    CHECK(first->state(1).presence == Presence::closed);
    const auto program = bound(second, 1, Rows().on(0, 0).wait(1, free_word(0)), {});
    CHECK_THROWS(std::runtime_error, "closed", program->start(0, 0, {}, {}));
    auto third = memory.join(2);
    CHECK(first->state(2).presence == Presence::here);
    third.reset();
    CHECK(first->state(2).presence == Presence::closed);
    CHECK(!first->failure());
}

TEST(paced_links_are_shared) {
    const std::atomic<bool> stop{false};
    const Memory memory(2);
    const std::int64_t start = now_ns();
    std::vector<std::thread> threads;
    for (int number = 0; number < 3; ++number) {
        threads.emplace_back([&] {
            Fabric fabric(memory.file(), 2, "pair", 0.1);
            CHECK(fabric.end(fabric.begin(0, 1, 1'000'000, 0, stop), stop));
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_LE(std::int64_t{29'900'000}, now_ns() - start);
}

TEST(shared_memory_refuses_what_cannot_be) {
    CHECK_THROWS(std::invalid_argument, "world is 65", create_memory(65, 0));
    CHECK_THROWS(std::bad_alloc, "1125899906842624 bytes", create_memory(2, std::size_t{1} << 50));
    CHECK_THROWS(std::bad_alloc, "17592186044416 bytes a copy for 2 ranks",
                 create_memory(2, std::size_t{1} << 44));
    const Memory memory(2);
    const auto join = [&](int file, int world, int rank, std::size_t bytes) {
        Group(Membership{file, world, rank, bytes}, 1.0, nullptr);
    };
    CHECK_THROWS(std::invalid_argument, "rank is 2", join(memory.file(), 2, 2, kBytes));
    CHECK_THROWS(std::invalid_argument, "group of 1 ranks", join(memory.file(), 1, 0, kBytes));
    CHECK_THROWS(std::invalid_argument, "group of 2 ranks", join(memory.file(), 2, 0, 1));
    CHECK_THROWS(std::invalid_argument, "not the group's memory",
                 join(memory.file(), 2, 0, 10 * kBytes));
    CHECK_THROWS(std::invalid_argument, "cannot be looked at", join(-1, 2, 0, kBytes));
    const int other = memfd_create("other", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(other, 1 << 20), 0);
    CHECK_THROWS(std::invalid_argument, "cannot shrink", join(other, 2, 0, 0));
    close(other);
    CHECK(ftruncate(memory.file(), 0) != 0);
    CHECK((fcntl(memory.file(), F_GETFD) & FD_CLOEXEC) != 0);

    const auto group = memory.join(0);
    CHECK_THROWS(std::invalid_argument, "joined already", memory.join(0));
    CHECK_THROWS(std::runtime_error, "processes share it", group->grow(1));
    CHECK_THROWS(std::runtime_error, "processes share it", group->reset());
    CHECK_THROWS(std::invalid_argument, "runs in another process", bound(group, 1, Rows(), {}));
}
