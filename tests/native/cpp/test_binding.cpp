// Binding checks every number of a program, and calls in a wrong state are refused.
#include <stdexcept>

#include "check.hpp"
#include "rows.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

constexpr Sizes kSizes{.segments = 2, .steps = 3, .slots = 2};

void refuses(const Rows& rows, const std::string& field, int line) {
    const auto group = std::make_shared<Group>(2, 1.0, nullptr);
    const std::string text = thrown<std::invalid_argument>(
        __FILE__, line, [&] { static_cast<void>(bound(group, 0, rows, kSizes)); });
    if (text.find("ops[0]: field " + field + " ") == std::string::npos) {
        give_up(__FILE__, line, "field " + field + " was meant: " + text);
    }
}

}  // namespace

TEST(binding_refuses_numbers_out_of_range) {
    refuses(Rows().on(2, 0).clear(0, 0), "0", __LINE__);
    refuses(Rows().on(-1, 0).clear(0, 0), "0", __LINE__);
    refuses(Rows().on(0, kMaxLanes).clear(0, 0), "1", __LINE__);
    refuses(Rows().on(0, -2).clear(0, 0), "1", __LINE__);
    refuses(Rows().step(3).clear(0, 0), "3", __LINE__);
    refuses(Rows().clear(2, 0), "4", __LINE__);
    refuses(Rows().clear(0, kWordsPerCopy), "5", __LINE__);
    refuses(Rows().raise(0, 0, std::int64_t{1} << 32), "6", __LINE__);
    refuses(Rows().wait(0, 0, 1, false, 2), "15", __LINE__);
    refuses(Rows().after(3), "4", __LINE__);
    refuses(Rows().copy({2}, {0}, 1, 1), "4", __LINE__);
    refuses(Rows().copy({0, -1}, {0}, 1, 1), "5", __LINE__);
    refuses(Rows().copy({0}, {2}, 1, 1), "7", __LINE__);
    refuses(Rows().copy({0}, {1, 0, -1}, 1, 1), "9", __LINE__);
    refuses(Rows().copy({0}, {1}, -1, 1), "10", __LINE__);
    refuses(Rows().copy({0}, {1}, std::int64_t{1} << 40, std::int64_t{1} << 40), "11", __LINE__);
    refuses(Rows().copy({0}, {1}, 1, 1, {2, 0}), "12", __LINE__);
    refuses(Rows().copy({0}, {1}, 1, 1, {0, 2}), "13", __LINE__);
    refuses(Rows().copy({0}, {1}, 1, 1, {1, 1}), "13", __LINE__);
    refuses(Rows().copy({0}, {1}, 1, 1, {0, 1, -1}), "14", __LINE__);
    refuses(Rows().copy({0}, {1}, 1, 1, {}, 4), "15", __LINE__);
    // Segments never decrease.
    const auto group = std::make_shared<Group>(2, 1.0, nullptr);
    CHECK_THROWS(std::invalid_argument, "ops[1]: field 0 (segment) is 0, not 1 to 1",
                 bound(group, 0, Rows().on(1, 0).clear(0, 0).on(0, 0).clear(0, 0), kSizes));
    CHECK_THROWS(std::invalid_argument, "rank is 2, not 0 to 1", bound(group, 2, Rows(), kSizes));
    CHECK_THROWS(std::invalid_argument, "window_slots[0]: field 1 (rank)",
                 bound(group, 0, Rows(), kSizes, {0, 2, 0, 0}));
    CHECK_THROWS(std::invalid_argument, "slot 1 is named twice",
                 bound(group, 0, Rows(), kSizes, {1, 0, 0, 0, 1, 1, 0, 0}));
    CHECK_THROWS(std::invalid_argument, "beyond any memory",
                 bound(group, 0, Rows().copy({0, std::int64_t{1} << 40}, {1}, 1, 1), kSizes,
                       {0, 0, 0, std::int64_t{1} << 40}));
}

TEST(groups_and_fabrics_refuse_numbers_out_of_range) {
    CHECK_THROWS(std::invalid_argument, "world is 0", Group(0, 1.0, nullptr));
    CHECK_THROWS(std::invalid_argument, "world is 65", Group(65, 1.0, nullptr));
    CHECK_THROWS(std::invalid_argument, "timeout_s", Group(2, 0.0, nullptr));
    CHECK_THROWS(std::invalid_argument, "links 3 ranks",
                 Group(2, 1.0, std::make_shared<Fabric>(3, Fabric::Per::pair, 1.0)));
    CHECK_THROWS(std::invalid_argument, "\"both\"", Fabric(2, "both", 1.0));
    CHECK_THROWS(std::invalid_argument, "gbps", Fabric(2, "port", -1.0));
    Group group(2, 1.0, nullptr);
    CHECK_THROWS(std::invalid_argument, "copy is 2", group.window(0, 2));
    CHECK_THROWS(std::invalid_argument, "word is -1", group.word(0, 0, -1));
    group.grow(100);
    const std::size_t before = group.capacity();
    const std::byte* const window = group.window(1, 1);
    CHECK_THROWS(OutOfMemory, "bytes", group.grow(std::size_t{1} << 50));
    CHECK_EQ(group.capacity(), before);
    CHECK(group.window(1, 1) == window);
    group.grow(1);
    CHECK(group.window(1, 1) == window);
}

TEST(calls_come_in_their_season) {
    const auto group = std::make_shared<Group>(2, 10.0, nullptr);
    const std::vector<std::int64_t> windows{0, 1, 0, 0};
    const auto program =
        bound(group, 0, Rows().on(1, 0).step(1).copy({0}, {1}, 1, 8), kSizes, windows);
    std::int64_t room = 0;
    Slots slots(2);
    slots.set(1, &room, 8);
    const auto start = [&] { program->start(0, 0, slots.addresses, slots.pitches); };
    CHECK_THROWS(std::runtime_error, "no call runs", program->submit(0));
    CHECK_THROWS(std::runtime_error, "no call runs", program->finish());
    CHECK_THROWS(std::runtime_error, "grow them first", start());
    group->grow(8);
    CHECK_THROWS(std::invalid_argument, "2 slots, and was given 0", program->start(0, 0, {}, {}));
    start();
    CHECK(program->running());
    CHECK_THROWS(std::runtime_error, "runs already", start());
    CHECK_THROWS(std::runtime_error, "1 programs run", group->grow(1 << 20));
    CHECK_THROWS(std::runtime_error, "1 programs run", group->reset());
    CHECK_THROWS(std::invalid_argument, "cannot be marked", program->mark(1));
    CHECK_THROWS(std::invalid_argument, "step is 3", program->mark(3));
    program->mark(2);
    CHECK(program->submit(1));
    CHECK_THROWS(std::invalid_argument, "segment is 0, not 2 to 1", program->submit(0));
    CHECK(program->finish());
    CHECK(!program->running());
}
