// Faults that tests request, and counts of executed work. Tests set them through the exported
// ficcoDouble... functions at the end of faults.cpp.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "abi.hpp"

namespace ficco::driver_double {

class Faults {
  public:
    static Faults& get();  // lives until the process ends

    // The status with which this call of `function` must fail immediately, if any.
    std::optional<Status> take(const std::string& function);
    // Returns when calls of `function` are no longer held.
    void wait_while_held(std::string_view function);
    double copy_delay();  // seconds that the next copy must wait first
    double jitter();      // seconds that the next operation of a stream shall wait first
    // How many hardware queues a context has, which streams get in turn; 0: one per stream.
    struct Queues {
        std::size_t count;
        bool by_priority;  // whether each priority has so many
    };
    Queues queues();
    // The fate of a stream's write to the memory of another device.
    enum class PeerWrites { kDone, kRefused, kLost };
    PeerWrites peer_writes();
    // The fate of copies to other devices: of four bytes, which are signals, or of larger ones.
    enum class Copies { kDone, kSignalsLost, kDataLate };
    Copies copies();
    void count(const std::string& kind, std::uint64_t amount);

    void fail_call(const std::string& function, int skip, Status status);
    void delay_copies(double seconds, int every);
    void hold_copies(bool on);
    void set_jitter(unsigned seed, double max_seconds);
    void set_queues(Queues queues);
    std::uint64_t counted(const std::string& kind);
    void reset();  // resets the faults to those of the environment, and all counts to 0

  private:
    struct Rule {
        std::string function;
        int skip;
        Status status;
    };

    Faults() { reset(); }

    std::mutex mutex_;
    std::condition_variable released_;
    bool holds_copies_ = false;
    std::list<Rule> rules_;
    double copy_seconds_ = 0;
    std::uint64_t copy_every_ = 0;
    std::uint64_t copies_seen_ = 0;
    double jitter_seconds_ = 0;
    std::mt19937 random_;
    Queues queues_{0, false};
    PeerWrites peer_writes_ = PeerWrites::kDone;
    Copies copies_ = Copies::kDone;
    std::map<std::string, std::uint64_t> counts_;
};

}  // namespace ficco::driver_double
