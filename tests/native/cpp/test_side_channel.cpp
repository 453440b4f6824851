// The way by which commands reach a GPU whose streams wait forever, without pending commands.
#include <array>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fake_gpu.hpp"
#include "ficco/clock.hpp"
#include "ficco/gpu_side_channel.hpp"

using namespace ficco;
using namespace ficco::test;

namespace {

// The common state of a device and its second opening.
struct Said {
    std::vector<std::string> commands;  // "usual" or "apart", then the address of a word
    bool waits = false;                 // whether the usual streams do nothing
    bool refuses = false;               // to be opened apart
    bool one_queue = false;
    bool once = false;  // a device is opened once
    int busy = 0;       // looks at a stream before it is done
    int opened = 0;
    int streams = 0;  // of devices apart, now
};

class ToldGpu final : public FakeGpu {
  public:
    explicit ToldGpu(std::shared_ptr<Said> said, bool apart = false)
        : said_(std::move(said)), apart_(apart) {
        said_->opened += apart_;
    }

    GpuFacts facts() const noexcept override {
        GpuFacts facts = has;
        facts.apart = !said_->once;
        return facts;
    }
    std::shared_ptr<Gpu> apart() override {
        if (said_->refuses) throw GpuError("no memory");
        return std::make_shared<ToldGpu>(said_, true);
    }
    bool one_queue() const noexcept override { return said_->one_queue; }
    GpuStream new_stream(bool urgent) override {
        said_->streams += apart_;
        return FakeGpu::new_stream(urgent);
    }
    void delete_stream(GpuStream) noexcept override { said_->streams -= apart_; }
    void words(std::span<const WordCommand> commands, GpuStream) override {
        const std::string way = apart_ ? "apart " : "usual ";
        said_->commands.push_back(way + std::to_string(commands.front().address));
        done_ = false;
    }
    bool idle(GpuStream) override {
        if (said_->busy > 0) return --said_->busy, false;
        done_ = done_ || apart_ || !said_->waits;
        return done_;
    }

  private:
    const std::shared_ptr<Said> said_;
    const bool apart_;
    bool done_ = true;
};

constexpr GpuAddress kProbe = 1;

struct Asked {
    double answers_within_s = 0.02;  // in tests where a way does not answer
    std::shared_ptr<Said> said = std::make_shared<Said>();
    Word stop{0};
    GpuSideChannel ways{std::make_shared<ToldGpu>(said), kProbe, answers_within_s, stop};

    bool ask(GpuAddress address) {
        return ways.ask([&](Gpu& gpu, GpuStream stream) {
            gpu.words(std::array{WordCommand{WordCommand::Kind::write, address, 1U}}, stream);
        });
    }
    std::string all() const {
        std::string text;
        for (const std::string& command : said->commands) text += command + "; ";
        return text;
    }
};

}  // namespace

TEST(a_gpu_that_answers_is_not_opened_apart) {
    Asked asked;
    CHECK(asked.ask(5));
    CHECK_EQ(asked.all(), "usual 1; usual 5; ");
    CHECK_EQ(asked.said->opened, 0);
}

TEST(a_way_that_does_not_answer_gets_one_probe_and_nothing_else) {
    Asked asked;
    asked.said->waits = true;
    CHECK(asked.ask(5));
    CHECK(asked.ask(6));
    CHECK_EQ(asked.all(), "usual 1; apart 1; apart 5; apart 1; apart 6; ");
    CHECK_EQ(asked.said->opened, 1);
    asked.said->waits = false;
    asked.said->commands.clear();
    CHECK(asked.ask(7));
    CHECK_EQ(asked.all(), "usual 1; usual 7; ");
}

TEST(a_way_that_is_held_ends_later) {
    auto asked = std::make_unique<Asked>();
    const auto said = asked->said;
    said->waits = true;
    auto held = asked->ways.answering();
    CHECK_EQ(asked->all(), "usual 1; apart 1; ");
    asked.reset();
    CHECK_EQ(said->streams, 1);
    held.reset();
    CHECK_EQ(said->streams, 0);
}

TEST(what_is_asked_by_halves_is_done_when_that_is_told) {
    Asked asked{.answers_within_s = 30.0};  // a busy machine may be slow
    bool told = false;
    try {
        asked.ways.ask([&](Gpu& gpu, GpuStream stream) {
            gpu.words(std::array{WordCommand{WordCommand::Kind::write, 5, 1}}, stream);
            asked.said->busy = 3;
            throw GpuError("the second half is refused");
        });
    } catch (const GpuError&) {
        told = true;
    }
    CHECK(told);
    CHECK_EQ(asked.said->busy, 0);
}

TEST(one_queue_is_asked_last) {
    Asked asked;
    asked.said->one_queue = true;
    CHECK(asked.ask(5));
    CHECK_EQ(asked.all(), "apart 1; apart 5; ");
    Asked refused;
    refused.said->one_queue = refused.said->refuses = true;
    CHECK(refused.ask(6));
    CHECK_EQ(refused.all(), "usual 1; usual 6; ");
}

TEST(a_gpu_that_answers_by_no_way_is_told_why) {
    Asked asked;
    asked.said->waits = asked.said->refuses = true;
    CHECK(!asked.ask(5));
    CHECK(!asked.ask(5));
    CHECK_EQ(asked.all(), "usual 1; ");
    CHECK_EQ(asked.ways.refusal(), "no memory");
    asked.said->refuses = false;
    CHECK(!asked.ask(5));  // it is not tried again at once
    CHECK_EQ(asked.said->opened, 0);
    sleep_until_ns(now_ns() + 1'100'000'000);
    CHECK(asked.ask(5));
    CHECK_EQ(asked.all(), "usual 1; apart 1; apart 5; ");
    CHECK_EQ(asked.ways.refusal(), "");
}

TEST(a_gpu_that_opens_once_is_not_opened_apart) {
    Asked asked;
    asked.said->waits = asked.said->once = true;
    CHECK(!asked.ask(5));
    CHECK_EQ(asked.all(), "usual 1; ");
    CHECK_EQ(asked.said->opened, 0);
    CHECK_EQ(asked.ways.refusal(), "the driver opens a device once");
}

TEST(whoever_stops_asks_nothing_more) {
    Asked asked;
    asked.stop = 1;
    CHECK(!asked.ask(5));
    CHECK_EQ(asked.all(), "");
}
