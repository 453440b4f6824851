// Paced links: how long a transfer must last, and sleeping for that long. Moves no bytes.
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

// A transfer begins, its bytes are moved by whoever began it, and `end` sleeps until the model says
// that it is over. All calls may come from any thread. Processes may share the links: each has a
// fabric object, and the state of the model lies in the memory of their group.
//
// No thread keeps the model going. It is moved to the present by whoever looks, event by event at
// their exact times, and as all future ends are known until another transfer begins, each sleeper
// knows when to wake by itself. Only a beginning, or a transfer given up, can make another one end
// earlier; then its sleeper is woken to look again.
class Fabric {
  public:
    enum class Per { pair, port };

    Fabric(int world, Per per, double gbps);               // throws std::invalid_argument
    Fabric(int world, std::string_view per, double gbps);  // "pair" or "port"
    Fabric(int memory, int world, std::string_view per, double gbps);  // in a group's memory

    // Of the model, for whoever makes such memory.
    static std::size_t state_bytes() noexcept;
    static void init_state(std::byte* memory);

    int world() const noexcept { return world_; }
    Per per() const noexcept { return per_; }
    double gbps() const noexcept { return model_.rate(); }

    // Returns what `end` wants. Where kMaxFlows are under way the next one waits for a place.
    int begin(int from, int to, std::int64_t bytes, std::int64_t latency_ns,
              const std::atomic<bool>& stop);

    // Sleeps until the modelled end. Returns false, soon, when `stop` becomes true before that.
    bool end(int transfer, const std::atomic<bool>& stop);

  private:
    struct Transfer {
        std::atomic<bool> used;
        double look_ns;   // its end, or an earlier time to look again; 0: not worked out
        double sleep_ns;  // when its sleeper will wake by itself; 0: nobody sleeps
        Word woken;       // counts the times its sleeper was told to look again
    };

    // Everything that is not scratch. Plain and of a fixed size, for it may lie in shared memory;
    // times are counted from `epoch_ns` so that a double holds them exactly.
    struct State {
        RobustMutex mutex;  // holds all below, and the scratch of each process
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
