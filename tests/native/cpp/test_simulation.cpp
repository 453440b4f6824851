// Exact closed forms of the simulator's core, and a comparison with the link model.
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "ficco/simulation.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr double kOn = static_cast<double>(Act::wait);
constexpr double kRaise = static_cast<double>(Act::raise);
constexpr double kClear = static_cast<double>(Act::clear);
constexpr double kDelay = static_cast<double>(Act::delay);
constexpr double kWork = static_cast<double>(Act::work);
constexpr double kCopy = static_cast<double>(Act::copy);

// Rows of a plan of `world` ranks over a switch: a port out and one in of each, 1 byte per ns.
struct Lanes {
    explicit Lanes(int world) : world(world), starts(static_cast<std::size_t>(world), 0.0) {
        for (int from = 0; from < world; ++from) {
            for (int to = 0; to < world; ++to) routes.insert(routes.end(), {from, world + to, -1});
        }
        kinds.assign(static_cast<std::size_t>(2 * world), 0);
    }

    int lane(int rank) {
        lanes.push_back(rank);
        return static_cast<int>(lanes.size()) - 1;
    }

    int word(int rank, bool raised = false) {
        words.insert(words.end(), {rank, raised});
        return static_cast<int>(words.size()) / kWordFields - 1;
    }

    int transfer(double latency_ns, double bytes, double limit = 1.0) {
        transfers.insert(transfers.end(), {latency_ns, bytes, limit});
        return static_cast<int>(transfers.size()) / kTransferFields - 1;
    }

    struct Each {
        double act, number, amount;
    };

    int row(int lane, const std::vector<Each>& given, const std::vector<int>& after = {},
            double release_ns = 0.0) {
        rows.insert(rows.end(),
                    {static_cast<double>(lane), release_ns, static_cast<double>(after.size()),
                     static_cast<double>(given.size())});
        afters.insert(afters.end(), after.begin(), after.end());
        for (const Each& each : given) {
            actions.insert(actions.end(), {each.act, each.number, each.amount});
        }
        return static_cast<int>(rows.size()) / kRowFields - 1;
    }

    Simulation simulation() const {
        return {{lanes, starts, rows, afters, actions, transfers, words},
                {routes, kinds, rates},
                costs};
    }

    std::vector<SimulatedTimes> run() const {
        Simulation simulated = simulation();
        simulated.run();
        CHECK(simulated.stuck().empty());
        return simulated.times();
    }

    int world;
    std::vector<std::int64_t> lanes, afters, words, routes, kinds;
    std::vector<double> starts, rows, actions, transfers;
    std::vector<std::vector<double>> rates{{1.0}};
    SimulatedCosts costs;
};

void check_span(const SimulatedTimes& found, double start_ns, double end_ns) {
    CHECK_NEAR(found.start_ns, start_ns, 1e-6);
    CHECK_NEAR(found.end_ns, end_ns, 1e-6);
}

}  // namespace

TEST(simulated_lanes_meet_through_words) {
    Lanes plan(2);
    plan.costs.wait_ns = 3.0;
    plan.costs.raise_ns = 7.0;
    const int there = plan.word(1);
    const int here = plan.word(0);
    const int ready = plan.word(1, true);
    const int first = plan.lane(0);
    const int second = plan.lane(1);
    const int third = plan.lane(0);
    plan.row(first, {{kDelay, 0, 100.0}, {kRaise, there * 1.0, 0}, {kRaise, here * 1.0, 0}});
    plan.row(second, {{kOn, ready * 1.0, 0}, {kOn, there * 1.0, 0}});  // holds already; comes
    plan.row(second, {{kOn, there * 1.0, 0}, {kDelay, 0, 5.0}, {kClear, there * 1.0, 0}});
    plan.row(third, {{kOn, here * 1.0, 0}});
    const auto times = plan.run();
    check_span(times[0], 0.0, 100.0);
    check_span(times[1], 0.0, 107.0);    // another rank's, later
    check_span(times[2], 110.0, 115.0);  // begins with what is no wait
    check_span(times[3], 0.0, 100.0);    // its own rank's, at once
}

TEST(simulated_rows_come_after_others_and_their_host) {
    Lanes plan(1);
    plan.starts = {20.0};
    const int one = plan.lane(0);
    const int other = plan.lane(0);
    const int first = plan.row(one, {{kDelay, 0, 50.0}});
    plan.row(other, {{kDelay, 0, 1.0}}, {first});
    plan.row(other, {{kDelay, 0, 1.0}}, {first}, 200.0);  // not before its host, from the start
    plan.row(one, {});
    const auto times = plan.run();
    check_span(times[0], 20.0, 70.0);
    check_span(times[1], 70.0, 71.0);
    check_span(times[2], 220.0, 221.0);
    check_span(times[3], 70.0, 70.0);
}

TEST(simulated_copies_share_ports_up_to_their_limits) {
    Lanes plan(4);
    const double slow = plan.transfer(10.0, 100.0, 0.25);
    const double fast = plan.transfer(10.0, 300.0);
    const int one = plan.row(plan.lane(0), {{kCopy, 1, slow}});
    const int other = plan.row(plan.lane(0), {{kCopy, 2, fast}});
    const int apart = plan.row(plan.lane(3), {{kCopy, 0, fast}});
    const auto times = plan.run();
    check_span(times[static_cast<std::size_t>(one)], 0.0, 410.0);
    check_span(times[static_cast<std::size_t>(other)], 0.0, 410.0);  // three quarters are left
    check_span(times[static_cast<std::size_t>(apart)], 0.0, 310.0);
}

TEST(simulated_ports_carry_what_so_many_get) {
    Lanes plan(4);
    plan.rates = {{1.0, 0.5}};  // two together get half, three as well
    const double whole = plan.transfer(0.0, 100.0);
    for (int to = 1; to < 4; ++to) plan.row(plan.lane(0), {{kCopy, to * 1.0, whole}});
    for (const SimulatedTimes& each : plan.run()) check_span(each, 0.0, 600.0);
}

TEST(simulated_engines_take_copies_in_turn) {
    Lanes plan(4);
    plan.costs.copy_engines = 1;
    const double each = plan.transfer(10.0, 100.0);
    for (int to = 1; to < 4; ++to) plan.row(plan.lane(0), {{kCopy, to * 1.0, each}});
    plan.row(plan.lane(3), {{kCopy, 0, each}});
    const auto times = plan.run();
    check_span(times[0], 0.0, 110.0);
    check_span(times[1], 0.0, 210.0);
    check_span(times[2], 0.0, 310.0);
    check_span(times[3], 0.0, 110.0);
}

TEST(simulated_work_shares_a_device) {
    Lanes plan(2);
    plan.row(plan.lane(0), {{kWork, 0, 100.0}});
    plan.row(plan.lane(0), {{kDelay, 0, 50.0}, {kWork, 0, 100.0}});
    plan.row(plan.lane(1), {{kWork, 0, 70.0}, {kWork, 0, 0.0}});
    const auto times = plan.run();
    check_span(times[0], 0.0, 150.0);  // 50 alone, 100 at a half
    check_span(times[1], 0.0, 200.0);  // 100 at a half, 50 alone
    check_span(times[2], 0.0, 70.0);
}

TEST(simulated_work_and_copies_slow_each_other) {
    for (const int cores : {0, 4}) {  // four are enough for both
        Lanes plan(2);
        plan.costs.cores = cores;
        plan.costs.work_beside_copies = 2.0;
        plan.costs.copies_beside_work = 4.0;
        plan.row(plan.lane(0), {{kCopy, 1, plan.transfer(10.0, 100.0) * 1.0}});
        plan.row(plan.lane(1), {{kWork, 0, 70.0}});
        const auto times = plan.run();
        // Until 10 alone. The work then lasts 120 more, in which 30 bytes pass; 70 pass alone.
        check_span(times[0], 0.0, 200.0);
        check_span(times[1], 0.0, 130.0);
    }
}

TEST(simulated_work_and_copies_share_cores) {
    // Two cores, three ranks: two multiply, the third one copies.
    Lanes plan(3);
    plan.costs.cores = 2;
    plan.row(plan.lane(0), {{kWork, 0, 40.0}});
    plan.row(plan.lane(1), {{kDelay, 0, 60.0}, {kWork, 0, 10.0}});
    plan.row(plan.lane(1), {{kWork, 0, 100.0}});
    plan.row(plan.lane(2), {{kCopy, 0, plan.transfer(10.0, 80.0) * 1.0}});
    const auto times = plan.run();
    // To 10 each has a core. Then three share two: the first one's 30 last 45, in which 30 of the
    // others pass, too; from 55 on each has a core again, but from 60 to 75.
    check_span(times[0], 0.0, 55.0);
    check_span(times[1], 0.0, 75.0);   // 10 at two thirds
    check_span(times[2], 0.0, 120.0);  // 10 + 30 + 5 + 10, and 45 alone
    check_span(times[3], 0.0, 110.0);  // 30 + 5 + 10 of its 80 bytes by then, and 35 alone
}

TEST(simulated_copies_last_as_the_model_of_links_says) {
    std::mt19937 random(5);
    constexpr int kWorld = 5;
    for (int round = 0; round < 200; ++round) {
        Lanes plan(kWorld);
        std::vector<fluid::Flow> flows;
        fluid::Indices live;
        for (int number = 0; number < 12; ++number) {
            const int from = static_cast<int>(random() % kWorld);
            const int to = static_cast<int>(random() % kWorld);
            const double latency_ns = static_cast<double>(random() % 500);
            const double bytes = static_cast<double>(random() % 1000);
            const double limit = 0.2 * static_cast<double>(1 + random() % 8);
            plan.row(plan.lane(from),
                     {{kCopy, to * 1.0, plan.transfer(latency_ns, bytes, limit) * 1.0}});
            flows.push_back({{from, kWorld + to, -1}, latency_ns, bytes, limit, 0, fluid::kNever});
            live.push(number);
        }
        fluid::Model model(1.0);
        model.advance(flows, live, 0.0, fluid::kNever);
        const auto times = plan.run();
        for (std::size_t at = 0; at < flows.size(); ++at) {
            CHECK_NEAR(times[at].end_ns, flows[at].end_ns, 10.0);  // what rounding leaves of bytes
        }
    }
}

TEST(simulated_lanes_that_wait_for_ever_are_named) {
    Lanes plan(2);
    const int never = plan.word(1);
    const int stuck = plan.row(plan.lane(1), {{kDelay, 0, 5.0}, {kOn, never * 1.0, 0}});
    plan.row(plan.lane(1), {{kDelay, 0, 1.0}}, {stuck});
    plan.row(plan.lane(0), {{kDelay, 0, 1.0}});
    Simulation simulated = plan.simulation();
    simulated.run();
    const auto found = simulated.stuck();
    CHECK_EQ(found.size(), std::size_t{2});
    CHECK_EQ(found[0].row, stuck);
    CHECK_EQ(found[0].word, never);
    CHECK_EQ(found[1].after, stuck);
    CHECK_EQ(found[1].word, -1);
    check_span(simulated.times()[2], 0.0, 1.0);
    CHECK_EQ(simulated.times()[0].end_ns, fluid::kNever);
}

TEST(simulated_rows_are_checked) {
    const auto refused = [](auto change, const char* words) {
        Lanes plan(2);
        const int word = plan.word(0);
        const int lane = plan.lane(0);
        const int first = plan.row(lane, {{kOn, word * 1.0, 0}, {kWork, 0, 1.0}});
        plan.row(lane, {{kCopy, 1, plan.transfer(0.0, 1.0) * 1.0}}, {first});
        change(plan);
        try {
            plan.simulation();
        } catch (const std::invalid_argument& error) {
            if (std::string(error.what()).find(words) != std::string::npos) return;
            give_up(__FILE__, __LINE__, std::string(words) + " is not said: " + error.what());
        }
        give_up(__FILE__, __LINE__, std::string(words) + ": not refused");
    };
    refused([](Lanes& plan) { plan.lanes[0] = 2; }, "lane 0");
    refused([](Lanes& plan) { plan.starts[1] = -1.0; }, "start of rank 1");
    refused([](Lanes& plan) { plan.rows[0] = 1.0; }, "lane of row 0");
    refused([](Lanes& plan) { plan.rows[1] = std::nan(""); }, "release of row 0");
    refused([](Lanes& plan) { plan.rows[3] = 4.0; }, "actions of row 0");
    refused([](Lanes& plan) { plan.rows[3] = 3.0; }, "more actions");
    refused([](Lanes& plan) { plan.rows[6] = 2.0; }, "afters of row 1");
    refused([](Lanes& plan) { plan.afters[0] = 1; }, "after of row 1");
    refused([](Lanes& plan) { plan.actions[0] = 6.0; }, "action 0");
    refused([](Lanes& plan) { plan.actions[1] = 1.0; }, "number of action 0");
    refused([](Lanes& plan) { plan.actions[5] = -1.0; }, "action 1");
    refused([](Lanes& plan) { plan.actions[7] = 2.0; }, "number of action 2");
    refused([](Lanes& plan) { plan.actions[8] = 0.5; }, "transfer of action 2");
    refused([](Lanes& plan) { plan.transfers[1] = fluid::kNever; }, "transfer 0");
    refused([](Lanes& plan) { plan.transfers[2] = 0.0; }, "transfer 0");
    refused([](Lanes& plan) { plan.words[0] = -1; }, "word 0");
    refused([](Lanes& plan) { plan.routes[0] = 4; }, "route 0");
    refused([](Lanes& plan) { plan.routes.pop_back(); }, "routes are");
    refused([](Lanes& plan) { plan.kinds[3] = 1; }, "port 3");
    refused([](Lanes& plan) { plan.rates[0][0] = 0.0; }, "rates of ports");
}

// A rate is max-min fair when each flow is at its limit, or has a full port where none is faster.
TEST(model_is_fair_for_any_limits) {
    std::mt19937 random(6);
    constexpr std::int32_t kPorts = 7;
    const std::vector<std::vector<double>> rates{{4.0}, {6.0, 5.0, 3.0}};
    std::vector<std::int32_t> kinds;
    for (std::int32_t number = 0; number < kPorts; ++number) kinds.push_back(number % 2);
    fluid::Model model(kinds, rates);
    for (int round = 0; round < 2000; ++round) {
        std::vector<fluid::Flow> flows(1 + random() % 20);
        fluid::Indices live;
        std::vector<std::size_t> users(kPorts);
        for (fluid::Flow& flow : flows) {
            const auto first = static_cast<std::int32_t>(random() % kPorts);
            flow = {{first, (first + 1) % kPorts, (first + 3) % kPorts}, 0.0, 1.0, 0.0, 0.0, 0.0};
            flow.limit =
                random() % 3 == 0 ? fluid::kNever : 0.3 * static_cast<double>(1 + random() % 9);
            if (random() % 2 == 0) flow.ports[2] = -1;
            for (const auto port : flow.ports) {
                if (port >= 0) ++users[static_cast<std::size_t>(port)];
            }
            live.push(live.count);
        }
        model.share(flows, live, 0.0);
        std::vector<double> load(kPorts);
        std::vector<double> fastest(kPorts);
        for (const fluid::Flow& flow : flows) {
            for (const auto port : flow.ports) {
                if (port < 0) continue;
                load[static_cast<std::size_t>(port)] += flow.rate;
                fastest[static_cast<std::size_t>(port)] =
                    std::max(fastest[static_cast<std::size_t>(port)], flow.rate);
            }
        }
        const auto room = [&](std::size_t port) {
            const auto& kind = rates[static_cast<std::size_t>(kinds[port])];
            return kind[std::min(users[port], kind.size()) - 1];
        };
        for (std::size_t port = 0; port < load.size(); ++port) {
            if (users[port] > 0) CHECK_LE(load[port], room(port) + 1e-6);
        }
        for (const fluid::Flow& flow : flows) {
            bool bound = flow.rate >= flow.limit - 1e-6;
            CHECK_LE(flow.rate, flow.limit + 1e-6);
            for (const auto number : flow.ports) {
                if (number < 0) continue;
                const auto port = static_cast<std::size_t>(number);
                bound |= load[port] >= room(port) - 1e-6 && fastest[port] <= flow.rate + 1e-6;
            }
            CHECK(bound);
        }
    }
}
