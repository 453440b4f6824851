// Paced links: the minimum duration of transfers, and sleeps for that time. They move no bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "ficco/fluid.hpp"
#include "ficco/futex.hpp"
#include "ficco/mapping.hpp"
#include "ficco/robust.hpp"

namespace ficco {

// The caller begins a transfer and moves its bytes; then `end` sleeps until the end in the model.
// All methods may be called from any thread. Processes may share the links: each has a fabric
// object, and the state of the model is stored in the memory of their group.
//
// No thread runs the model. Each caller advances it to the present, event by event at their exact
// times. All future ends are known until another transfer begins, so each sleeper knows when to
// wake. Only the begin or cancellation of a transfer can make another one end earlier; its sleeper
// is then woken.
class Fabric {
  public:
    enum class Per { pair, port };

    Fabric(int world, Per per, double gbps);               // throws std::invalid_argument
    Fabric(int world, std::string_view per, double gbps);  // "pair" or "port"
    Fabric(int memory, int world, std::string_view per, double gbps);  // in a group's memory

    // The model's state, for the creator of shared memory.
    static std::size_t state_bytes() noexcept;
    static void init_state(std::byte* memory);

    int world() const noexcept { return world_; }
    Per per() const noexcept { return per_; }
    double gbps() const noexcept { return model_.rate(); }

    // Returns the argument of `end`. If kMaxFlows transfers are active, it waits for a free place.
    int begin(int from, int to, std::int64_t bytes, std::int64_t latency_ns,
              const std::atomic<bool>& stop);

    // Sleeps until the modelled end. Returns false, soon, when `stop` becomes true before that.
    bool end(int transfer, const std::atomic<bool>& stop);

  private:
    struct Transfer {
        std::atomic<bool> used;
        double look_ns;   // its end, or an earlier time to check again; 0: unknown
        double sleep_ns;  // when its sleeper will wake by itself; 0: there is no sleeper
        Word woken;       // number of wakes of its sleeper
    };

    // Everything except scratch. Plain and of a fixed size, as it may be in shared memory; times
    // are counted from `epoch_ns` so that a double holds them exactly.
    struct State {
        RobustMutex mutex;  // guards all below, and the scratch of each process
        std::int64_t epoch_ns;
        double now_ns;
        fluid::Indices live;
        fluid::Flow flows[fluid::kMaxFlows];
        Transfer transfers[fluid::kMaxFlows];
    };

    Fabric(int world, Per per, double gbps, Mapping memory);
    bool lock(const std::atomic<bool>& stop);
    void unlock() noexcept { state_->mutex.unlock(); }
    void mend() noexcept;
    double clock() const noexcept;
    int take_place();
    void settle();
    bool related(const fluid::Flow& one, const fluid::Flow& other) const noexcept;
    void changed(const fluid::Flow& by);
    void predict(const fluid::Flow& of);

    const int world_;
    const Per per_;
    Mapping memory_;
    State* const state_;
    fluid::Model model_;
    // A copy of the flows, for looking ahead.
    std::unique_ptr<fluid::Flow[]> ahead_;
    std::unique_ptr<std::int32_t[]> ahead_of_;
    fluid::Indices ahead_live_;
};

}  // namespace ficco
