// Exact closed forms of the fluid model, and durations of transfers by the model. Sleeps have tight
// lower and very loose upper bounds: the machine may be busy.
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ficco/clock.hpp"
#include "ficco/fabric.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

fluid::Flow flow(int first, int second, double bytes, double start_ns = 0.0) {
    return {{first, second, -1}, start_ns, bytes, fluid::kNever, 0.0, fluid::kNever};
}

fluid::Indices all(const std::vector<fluid::Flow>& flows) {
    fluid::Indices live;
    for (std::size_t at = 0; at < flows.size(); ++at) live.push(static_cast<std::int32_t>(at));
    return live;
}

// Ends of flows that begin together.
std::vector<double> ends(double rate, std::vector<fluid::Flow> flows) {
    fluid::Model model(rate);
    fluid::Indices live = all(flows);
    model.advance(flows, live, 0.0, fluid::kNever);
    CHECK(live.empty());
    std::vector<double> times;
    for (const fluid::Flow& each : flows) times.push_back(each.end_ns);
    return times;
}

}  // namespace

TEST(model_shares_a_link) {
    for (const double end : ends(2.0, {4, flow(0, -1, 1000.0)})) CHECK_NEAR(end, 2000.0, 1e-6);
    // The shorter ones leave: 3 share until 300, 2 until 500, then one.
    const auto times = ends(1.0, {flow(5, -1, 100.0), flow(5, -1, 200.0), flow(5, -1, 400.0)});
    CHECK_NEAR(times[0], 300.0, 1e-6);
    CHECK_NEAR(times[1], 500.0, 1e-6);
    CHECK_NEAR(times[2], 700.0, 1e-6);
    // Latency holds no bandwidth: the first flows alone until the second starts.
    const auto late = ends(1.0, {flow(0, -1, 100.0), flow(0, -1, 100.0, 60.0)});
    CHECK_NEAR(late[0], 140.0, 1e-6);
    CHECK_NEAR(late[1], 200.0, 1e-6);
    CHECK_NEAR(ends(1.0, {flow(0, -1, 0.0, 70.0)})[0], 70.0, 1e-6);
}

TEST(model_all_to_all_takes_as_long_as_rotation) {
    constexpr int kWorld = 8;
    std::vector<fluid::Flow> together;
    double rotation = 0.0;
    for (int shift = 1; shift < kWorld; ++shift) {
        std::vector<fluid::Flow> round;
        for (int rank = 0; rank < kWorld; ++rank) {
            round.push_back(flow(rank, kWorld + (rank + shift) % kWorld, 3000.0));
        }
        together.insert(together.end(), round.begin(), round.end());
        for (const double end : ends(3.0, round)) CHECK_NEAR(end, 1000.0, 1e-6);
        rotation += 1000.0;
    }
    for (const double end : ends(3.0, together)) CHECK_NEAR(end, rotation, 1e-6);
}

TEST(model_gives_what_others_cannot_use) {
    // Port 0 is shared by three; the fourth shares port 8 + 3 with one of them and gets the rest.
    const auto times =
        ends(1.0, {flow(0, 9, 300.0), flow(0, 10, 300.0), flow(0, 11, 300.0), flow(4, 11, 300.0)});
    for (int at = 0; at < 3; ++at) CHECK_NEAR(times[static_cast<std::size_t>(at)], 900.0, 1e-6);
    CHECK_NEAR(times[3], 450.0, 1e-6);
}

// A rate is max-min fair when each flow has a full port on which no flow is faster.
TEST(model_is_fair_for_any_flows) {
    std::mt19937 random(3);
    constexpr int kWorld = 6;
    fluid::Model model(10.0);
    for (int round = 0; round < 500; ++round) {
        std::vector<fluid::Flow> flows;
        const auto count = 1 + random() % 30;
        for (unsigned at = 0; at < count; ++at) {
            flows.push_back(flow(static_cast<int>(random() % kWorld),
                                 kWorld + static_cast<int>(random() % kWorld),
                                 1.0 + static_cast<double>(random() % 1000)));
        }
        fluid::Indices live = all(flows);
        double now = 0.0;
        while (!live.empty()) {
            const auto before = live;
            now = model.advance(flows, live, now, fluid::kNever, 1);
            std::vector<double> load(2 * kWorld);
            std::vector<double> fastest(2 * kWorld);
            for (const auto index : before) {
                const fluid::Flow& each = flows[static_cast<std::size_t>(index)];
                for (const auto port : {each.ports[0], each.ports[1]}) {
                    load[static_cast<std::size_t>(port)] += each.rate;
                    fastest[static_cast<std::size_t>(port)] =
                        std::max(fastest[static_cast<std::size_t>(port)], each.rate);
                }
            }
            for (const double sum : load) CHECK_LE(sum, 10.0 + 1e-6);
            for (const auto index : before) {
                const fluid::Flow& each = flows[static_cast<std::size_t>(index)];
                bool bottleneck = false;
                for (const auto port : {each.ports[0], each.ports[1]}) {
                    bottleneck |= load[static_cast<std::size_t>(port)] >= 10.0 - 1e-6 &&
                                  fastest[static_cast<std::size_t>(port)] <= each.rate + 1e-6;
                }
                CHECK(bottleneck);
            }
        }
    }
}

// The ends do not depend on the number of intermediate steps.
TEST(model_does_not_depend_on_looking) {
    std::mt19937 random(4);
    std::vector<fluid::Flow> flows;
    for (int at = 0; at < 40; ++at) {
        flows.push_back(flow(at % 5, 5 + (at * 7) % 11, 100.0 + at * 13.0, (at % 9) * 50.0));
    }
    const auto expected = ends(2.0, flows);
    fluid::Model model(2.0);
    fluid::Indices live = all(flows);
    double now = 0.0;
    while (!live.empty()) {
        now = model.advance(flows, live, now, now + static_cast<double>(random() % 100));
    }
    for (std::size_t at = 0; at < flows.size(); ++at) {
        CHECK_NEAR(flows[at].end_ns, expected[at], 1.0);
    }
}

namespace {

struct Sent {
    int from;
    int to;
    std::int64_t bytes;
    std::int64_t latency_ns = 0;
    double expected_ms = 0.0;
    int after_ms = 0;  // begins so much later than the others
};

void lasts(double found_ms, double expected_ms) {
    CHECK_LE(expected_ms - 0.05, found_ms);
    CHECK_LE(found_ms, expected_ms + 1000.0);  // a busy machine may stop a thread for that long
}

void check_lasts(Fabric::Per per, double gbps, const std::vector<Sent>& sent) {
    Fabric fabric(8, per, gbps);
    const std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    std::vector<double> ms(sent.size());
    const std::int64_t start = now_ns() + 20'000'000;  // so that threads begin together
    for (std::size_t at = 0; at < sent.size(); ++at) {
        threads.emplace_back([&, at] {
            const Sent& each = sent[at];
            sleep_until_ns(start + std::int64_t{each.after_ms} * 1'000'000);
            const std::int64_t begin = now_ns();
            CHECK(fabric.end(fabric.begin(each.from, each.to, each.bytes, each.latency_ns, stop),
                             stop));
            ms[at] = static_cast<double>(now_ns() - begin) * 1e-6;
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t at = 0; at < sent.size(); ++at) lasts(ms[at], sent[at].expected_ms);
}

}  // namespace

TEST(transfers_one_after_another) {
    Fabric fabric(2, Fabric::Per::pair, 0.1);
    const std::atomic<bool> stop{false};
    for (const std::int64_t latency_ns : {std::int64_t{0}, std::int64_t{2'000'000}}) {
        const std::int64_t start = now_ns();
        for (int number = 0; number < 5; ++number) {
            CHECK(fabric.end(fabric.begin(0, 1, 500'000, latency_ns, stop), stop));
        }
        const double each_ms = 5.0 + static_cast<double>(latency_ns) * 1e-6;
        lasts(static_cast<double>(now_ns() - start) * 1e-6, 5 * each_ms);
    }
}

TEST(transfers_that_share_and_that_do_not) {
    // The last cannot end before all bytes have passed, even if threads begin late.
    for (const auto per : {Fabric::Per::pair, Fabric::Per::port}) {
        Fabric fabric(8, per, 0.1);
        const std::atomic<bool> stop{false};
        std::vector<std::thread> threads;
        const std::int64_t start = now_ns();
        for (int number = 0; number < 4; ++number) {
            threads.emplace_back(
                [&] { CHECK(fabric.end(fabric.begin(0, 1, 500'000, 0, stop), stop)); });
        }
        for (std::thread& thread : threads) thread.join();
        lasts(static_cast<double>(now_ns() - start) * 1e-6, 20.0);
    }
    // Separate links: no transfer slows another.
    check_lasts(Fabric::Per::pair, 0.1,
                {{0, 1, 1'000'000, 0, 10.0},
                 {0, 2, 1'000'000, 0, 10.0},
                 {2, 1, 1'000'000, 0, 10.0},
                 {1, 0, 1'000'000, 5'000'000, 15.0}});
}

TEST(all_to_all_over_ports_takes_as_long_as_its_bytes) {
    constexpr int kWorld = 4;
    Fabric fabric(kWorld, Fabric::Per::port, 0.1);
    const std::atomic<bool> stop{false};
    for (const bool rotation : {false, true}) {
        std::vector<std::thread> threads;
        const std::int64_t start = now_ns();
        for (int rank = 0; rank < kWorld; ++rank) {
            const auto send = [&fabric, &stop, rank](int shift) {
                const int to = (rank + shift) % kWorld;
                CHECK(fabric.end(fabric.begin(rank, to, 1'000'000, 0, stop), stop));
            };
            if (rotation) {
                threads.emplace_back([send] {
                    for (int shift = 1; shift < kWorld; ++shift) send(shift);
                });
            } else {
                for (int shift = 1; shift < kWorld; ++shift) threads.emplace_back(send, shift);
            }
        }
        for (std::thread& thread : threads) thread.join();
        lasts(static_cast<double>(now_ns() - start) * 1e-6, 10.0 * (kWorld - 1));
    }
}

// A later transfer slows one flow, so that another ends earlier than predicted; its sleeper must be
// woken.
TEST(sleepers_are_woken_when_they_end_earlier) {
    Fabric fabric(8, Fabric::Per::port, 0.1);
    const std::atomic<bool> never{false};
    const std::atomic<bool> stop{true};
    const std::int64_t start = now_ns();
    // 0 -> 1 and 2 -> 1 share the port into 1: 600 ms each, if nothing else begins.
    std::vector<int> others{fabric.begin(0, 1, 30'000'000, 0, never)};
    std::int64_t lasted = 0;
    std::thread watched([&] {
        CHECK(fabric.end(fabric.begin(2, 1, 30'000'000, 0, never), never));
        lasted = now_ns() - start;
    });
    sleep_until_ns(start + 20'000'000);
    // Nine more out of 0: 0 -> 1 gets a tenth, 2 -> 1 nine tenths from now on.
    for (int number = 0; number < 9; ++number) {
        others.push_back(fabric.begin(0, 2 + number % 6, 30'000'000, 0, never));
    }
    watched.join();
    for (const int other : others) CHECK(!fabric.end(other, stop));
    // 20 ms at a half, then 90 MB/s: 342 ms.
    CHECK_LE(std::int64_t{340'000'000}, lasted);
    CHECK_LE(lasted, std::int64_t{560'000'000});
}

TEST(a_transfer_given_up_leaves_its_share) {
    Fabric fabric(2, Fabric::Per::pair, 0.1);
    const std::atomic<bool> never{false};
    const std::atomic<bool> stop{true};
    const std::int64_t start = now_ns();
    const int other = fabric.begin(0, 1, 100'000'000, 0, never);
    std::int64_t lasted = 0;
    std::thread watched([&] {
        CHECK(fabric.end(fabric.begin(0, 1, 20'000'000, 0, never), never));
        lasted = now_ns() - start;
    });
    sleep_until_ns(start + 20'000'000);
    CHECK(!fabric.end(other, stop));
    watched.join();
    // 20 ms at a half, then alone: 210 ms; with a half all the way 400.
    CHECK_LE(std::int64_t{208'000'000}, lasted);
    CHECK_LE(lasted, std::int64_t{390'000'000});
}

TEST(copies_of_programs_are_paced) {
    const auto fabric = std::make_shared<Fabric>(2, Fabric::Per::pair, 0.1);
    const auto group = std::make_shared<Group>(2, 30.0, fabric);
    group->grow(1'000'000);
    std::vector<std::uint8_t> memory(1'000'000, 9);
    Rows rows;
    rows.on(0, 0).step(0).copy({0}, {1}, 1000, 1000, {0, 1, 1'000'000});
    rows.step(1).copy({0}, {1}, 1, 1'000'000);  // local: at once
    const std::vector<std::int64_t> windows{1, 1, 0, 1000};
    const auto program = bound(group, 0, rows, {.steps = 2, .slots = 2}, windows);
    Slots slots(2);
    slots.set(0, memory.data(), 1000);
    CHECK(call(*program, 1, 1, 0, slots));
    std::vector<StepTimes> times(2);
    program->times(times);
    lasts(static_cast<double>(times[0].end_ns - times[0].start_ns) * 1e-6, 11.0);
    CHECK_EQ(std::to_integer<int>(group->window(1, 1)[999'999]), 9);
}
