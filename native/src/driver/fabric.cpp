// Advances the fluid model to the present, and sleeps. The rates are computed in fluid.cpp.
#include "ficco/fabric.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/shared.hpp"

namespace ficco {

namespace {

// Number of ends to predict. It bounds the time under the mutex; for up to eight ranks that send to
// all their peers it is nearly always enough to know every end exactly.
constexpr int kAhead = 32;

// An end that is earlier by less does not wake a sleeper: sleeps are not more exact (20 to 40 us
// late on a virtual machine of 2 cores), and many transfers cause many small changes.
constexpr double kEarlierNs = 20'000.0;

// Interval of polls for a free place among kMaxFlows. This never happens in practice.
constexpr std::int64_t kPlaceNs = 100'000;

// No transfer: the result of begin() if it gave up.
constexpr int kNone = -1;

// Time limit of a lock when all must stop. Only another process that stops while it holds the lock
// for a microsecond can cause such a wait.
constexpr std::int64_t kStoppedLockNs = 200'000'000;

Fabric::Per per_of(std::string_view name) {
    if (name == "pair") return Fabric::Per::pair;
    if (name == "port") return Fabric::Per::port;
    throw std::invalid_argument("per is \"pair\" or \"port\", not \"" + std::string(name) + "\"");
}

}  // namespace

Fabric::Fabric(int world, std::string_view per, double gbps) : Fabric(world, per_of(per), gbps) {}

Fabric::Fabric(int world, Per per, double gbps) : Fabric(world, per, gbps, Mapping(state_bytes())) {
    init_state(memory_.data());
}

Fabric::Fabric(int memory, int world, std::string_view per, double gbps)
    : Fabric(world, per_of(per), gbps, [&] {
          const SharedLayout layout(world, 0);  // the links' place does not depend on the capacity
          check_memory(memory, layout);
          return Mapping(memory, layout.fabric(), state_bytes());
      }()) {}

Fabric::Fabric(int world, Per per, double gbps, Mapping memory)
    : world_(world),
      per_(per),
      memory_(std::move(memory)),
      state_(reinterpret_cast<State*>(memory_.data())),
      model_(gbps),
      ahead_(new fluid::Flow[fluid::kMaxFlows]),
      ahead_of_(new std::int32_t[fluid::kMaxFlows]) {
    if (world < 1 || world > kMaxWorld) {
        throw std::invalid_argument("world is " + std::to_string(world) + ", not 1 to " +
                                    std::to_string(kMaxWorld));
    }
    if (!(gbps > 0.0) || !std::isfinite(gbps)) {
        throw std::invalid_argument("gbps is " + std::to_string(gbps) + ", not above 0");
    }
}

std::size_t Fabric::state_bytes() noexcept { return sizeof(State); }

void Fabric::init_state(std::byte* memory) {
    State* const state = new (memory) State;
    state->mutex.init();
    state->epoch_ns = ficco::now_ns();
    state->now_ns = 0.0;
}

// Returns false if all must stop and the lock is not available.
bool Fabric::lock(const std::atomic<bool>& stop) {
    RobustMutex::Got got = state_->mutex.try_lock();
    std::int64_t give_up_ns = 0;
    while (got == RobustMutex::Got::no) {
        if (stop.load(std::memory_order_acquire)) {
            const std::int64_t now = ficco::now_ns();
            if (give_up_ns == 0) give_up_ns = now + kStoppedLockNs;
            if (now >= give_up_ns) return false;
        }
        got = state_->mutex.lock_for(kLookAgainNs);
    }
    if (got == RobustMutex::Got::orphan) mend();
    return true;
}

// Repairs the state after a process died while it changed it. Its own flow counts only when it is
// complete (`used`). Flows of others are advanced by atomic writes, so at worst one of them is
// advanced over the same few microseconds twice. The list of flows is rebuilt.
void Fabric::mend() noexcept {
    State& state = *state_;
    state.live.clear();
    for (int place = 0; place < fluid::kMaxFlows; ++place) {
        Transfer& transfer = state.transfers[place];
        if (!transfer.used || state.flows[place].end_ns < fluid::kNever) continue;
        state.live.push(place);
        transfer.look_ns = 0.0;
        transfer.woken.fetch_add(1, std::memory_order_relaxed);
        futex_wake_all(transfer.woken);
    }
}

double Fabric::clock() const noexcept {
    return static_cast<double>(ficco::now_ns() - state_->epoch_ns);
}

int Fabric::take_place() {
    for (int place = 0; place < fluid::kMaxFlows; ++place) {
        if (!state_->transfers[place].used) return place;
    }
    return -1;
}

// Advances the model to the present. Flows that end before do so at their exact times.
void Fabric::settle() {
    const double now = std::max(clock(), state_->now_ns);
    model_.advance(state_->flows, state_->live, state_->now_ns, now);
    state_->now_ns = now;
}

bool Fabric::related(const fluid::Flow& one, const fluid::Flow& other) const noexcept {
    return per_ == Per::port || one.ports[0] == other.ports[0];
}

// A flow has begun or was canceled: the known ends of flows that may share with it become invalid.
void Fabric::changed(const fluid::Flow& by) {
    State& state = *state_;
    bool asleep = false;
    for (const std::int32_t index : state.live) {
        asleep |= state.transfers[index].sleep_ns > 0.0 && related(state.flows[index], by);
    }
    if (asleep) {
        predict(by);
        return;
    }
    for (const std::int32_t index : state.live) {
        if (related(state.flows[index], by)) state.transfers[index].look_ns = 0.0;
    }
}

// Predicts when to check each flow that is related to one, if no other flow begins.
void Fabric::predict(const fluid::Flow& of) {
    State& state = *state_;
    int count = 0;
    ahead_live_.clear();
    for (const std::int32_t index : state.live) {
        if (!related(state.flows[index], of)) continue;
        ahead_[static_cast<std::size_t>(count)] = state.flows[index];
        ahead_of_[static_cast<std::size_t>(count)] = index;
        ahead_live_.push(count++);
    }
    const std::span flows(ahead_.get(), static_cast<std::size_t>(count));
    const double reached = model_.advance(flows, ahead_live_, state.now_ns, fluid::kNever, kAhead);
    for (int at = 0; at < count; ++at) {
        const fluid::Flow& flow = flows[static_cast<std::size_t>(at)];
        Transfer& transfer = state.transfers[ahead_of_[static_cast<std::size_t>(at)]];
        // Beyond the prediction: a time before which it cannot end.
        const double look = flow.end_ns < fluid::kNever
                                ? flow.end_ns
                                : std::max(reached, flow.start_ns) + flow.left_bytes / gbps();
        if (look < transfer.sleep_ns - kEarlierNs) {
            transfer.woken.fetch_add(1, std::memory_order_relaxed);
            futex_wake_all(transfer.woken);
        }
        transfer.look_ns = look;
    }
}

int Fabric::begin(int from, int to, std::int64_t bytes, std::int64_t latency_ns,
                  const std::atomic<bool>& stop) {
    if (!lock(stop)) return kNone;
    int place = take_place();
    while (place < 0) {
        unlock();
        sleep_until_ns(ficco::now_ns() + kPlaceNs);
        if (stop.load(std::memory_order_acquire) || !lock(stop)) return kNone;
        place = take_place();
    }
    settle();
    State& state = *state_;
    fluid::Flow& flow = state.flows[place];
    if (per_ == Per::pair) {
        flow.ports[0] = from * world_ + to;
        flow.ports[1] = -1;
    } else {
        flow.ports[0] = from;
        flow.ports[1] = world_ + to;
    }
    flow.ports[2] = -1;
    flow.limit = fluid::kNever;
    flow.start_ns = state.now_ns + static_cast<double>(latency_ns);
    flow.left_bytes = static_cast<double>(bytes);
    flow.rate = 0.0;
    flow.end_ns = fluid::kNever;
    state.transfers[place].look_ns = 0.0;
    state.transfers[place].sleep_ns = 0.0;
    state.transfers[place].used.store(true, std::memory_order_release);  // the flow is complete
    state.live.push(place);
    changed(flow);
    unlock();
    return place;
}

bool Fabric::end(int place, const std::atomic<bool>& stop) {
    if (place == kNone || !lock(stop)) return false;
    fluid::Flow& flow = state_->flows[place];
    Transfer& transfer = state_->transfers[place];
    bool ended = true;
    for (;;) {
        if (clock() >= transfer.look_ns) {
            settle();
            if (flow.end_ns < fluid::kNever) break;
            predict(flow);
        }
        if (stop.load(std::memory_order_acquire)) {
            settle();
            state_->live.erase_if([place](std::int32_t index) { return index == place; });
            changed(flow);
            ended = false;
            break;
        }
        const double wake = std::min(transfer.look_ns, clock() + static_cast<double>(kLookAgainNs));
        const std::uint32_t seen = transfer.woken.load(std::memory_order_relaxed);
        transfer.sleep_ns = wake;
        unlock();
        futex_wait(transfer.woken, seen,
                   state_->epoch_ns + static_cast<std::int64_t>(std::ceil(wake)));
        if (!lock(stop)) return false;
        transfer.sleep_ns = 0.0;
    }
    transfer.used.store(false, std::memory_order_relaxed);
    unlock();
    return ended;
}

}  // namespace ficco
