// Faults and counts, and the functions by which tests set and read them. Processes that a test does
// not run itself get their faults from the environment:
//
//   FICCO_DOUBLE_FAIL=function:skip:status,...   FICCO_DOUBLE_COPY_DELAY=seconds[:every]
//   FICCO_DOUBLE_SINGLE_QUEUE=1                  FICCO_DOUBLE_JITTER=max_seconds[:seed]
//   FICCO_DOUBLE_QUEUES=hardware queues per priority of a device, which streams get in turn
//   FICCO_DOUBLE_PEER_WRITES=refused or lost, of stream writes to the memory of other devices
//   FICCO_DOUBLE_COPIES=lost: copies of 4 bytes to other devices are not done; late: larger ones
//   are done a second later, while their stream goes on
#include "faults.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "call.hpp"

namespace ficco::driver_double {

namespace {

std::string environment(const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? "" : text;
}

// "first" or "first:second"; missing values are unchanged.
void read_pair(const std::string& text, double& first, unsigned& second) {
    std::sscanf(text.c_str(), "%lf:%u", &first, &second);
}

}  // namespace

Faults& Faults::get() {
    static Faults& faults = *new Faults;
    return faults;
}

std::optional<Status> Faults::take(const std::string& function) {
    const std::lock_guard lock(mutex_);
    for (auto rule = rules_.begin(); rule != rules_.end(); ++rule) {
        if (rule->function != function || rule->skip-- > 0) continue;
        const Status status = rule->status;
        rules_.erase(rule);
        return status;
    }
    return std::nullopt;
}

void Faults::wait_while_held(std::string_view function) {
    if (!function.starts_with("cuMemcpy") && !function.starts_with("hipMemcpy")) return;
    std::unique_lock lock(mutex_);
    released_.wait(lock, [&] { return !holds_copies_; });
}

double Faults::copy_delay() {
    const std::lock_guard lock(mutex_);
    if (copy_every_ == 0) return 0;
    return ++copies_seen_ % copy_every_ == 0 ? copy_seconds_ : 0;
}

double Faults::jitter() {
    const std::lock_guard lock(mutex_);
    if (jitter_seconds_ <= 0) return 0;
    return std::uniform_real_distribution<double>(0, jitter_seconds_)(random_);
}

Faults::Queues Faults::queues() {
    const std::lock_guard lock(mutex_);
    return queues_;
}

Faults::PeerWrites Faults::peer_writes() {
    const std::lock_guard lock(mutex_);
    return peer_writes_;
}

Faults::Copies Faults::copies() {
    const std::lock_guard lock(mutex_);
    return copies_;
}

void Faults::count(const std::string& kind, std::uint64_t amount) {
    const std::lock_guard lock(mutex_);
    counts_[kind] += amount;
}

void Faults::fail_call(const std::string& function, int skip, Status status) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({function, skip, status});
}

void Faults::delay_copies(double seconds, int every) {
    const std::lock_guard lock(mutex_);
    copy_seconds_ = seconds;
    copy_every_ = static_cast<std::uint64_t>(std::max(every, 0));
    copies_seen_ = 0;
}

void Faults::hold_copies(bool on) {
    const std::lock_guard lock(mutex_);
    holds_copies_ = on;
    released_.notify_all();
}

void Faults::set_jitter(unsigned seed, double max_seconds) {
    const std::lock_guard lock(mutex_);
    random_.seed(seed);
    jitter_seconds_ = max_seconds;
}

void Faults::set_queues(Queues queues) {
    const std::lock_guard lock(mutex_);
    queues_ = queues;
}

std::uint64_t Faults::counted(const std::string& kind) {
    const std::lock_guard lock(mutex_);
    const auto found = counts_.find(kind);
    return found == counts_.end() ? 0 : found->second;
}

void Faults::reset() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
    std::istringstream rules(environment("FICCO_DOUBLE_FAIL"));
    for (std::string rule; std::getline(rules, rule, ',');) {
        std::istringstream fields(rule);
        Rule read{};
        char colon = 0;
        if (std::getline(fields, read.function, ':') &&
            fields >> read.skip >> colon >> read.status) {
            rules_.push_back(read);
        }
    }
    unsigned every = 1;
    copy_seconds_ = 0;
    read_pair(environment("FICCO_DOUBLE_COPY_DELAY"), copy_seconds_, every);
    copy_every_ = copy_seconds_ > 0 ? every : 0;
    copies_seen_ = 0;
    unsigned seed = 0;
    jitter_seconds_ = 0;
    read_pair(environment("FICCO_DOUBLE_JITTER"), jitter_seconds_, seed);
    random_.seed(seed);
    holds_copies_ = false;
    released_.notify_all();
    const std::string single = environment("FICCO_DOUBLE_SINGLE_QUEUE");
    queues_ = {!single.empty() && single != "0" ? 1U : 0U, false};
    if (const std::string queues = environment("FICCO_DOUBLE_QUEUES"); !queues.empty()) {
        queues_ = {std::stoul(queues), true};
    }
    const std::string peer_writes = environment("FICCO_DOUBLE_PEER_WRITES");
    peer_writes_ = peer_writes == "refused" ? PeerWrites::kRefused
                   : peer_writes == "lost"  ? PeerWrites::kLost
                                            : PeerWrites::kDone;
    const std::string copies = environment("FICCO_DOUBLE_COPIES");
    copies_ = copies == "lost"   ? Copies::kSignalsLost
              : copies == "late" ? Copies::kDataLate
                                 : Copies::kDone;
    counts_.clear();
}

}  // namespace ficco::driver_double

using ficco::driver_double::Faults;

// After `skip` more calls, the next call of `function` (its name without _v2) only returns
// `status`. Every call of this adds a rule, which applies once.
DOUBLE_API void ficcoDoubleFailCall(const char* function, int skip, int status) {
    Faults::get().fail_call(function, skip, status);
}

// Every `every`-th copy waits that long in its stream first; 0 ends this.
DOUBLE_API void ficcoDoubleDelayCopies(double seconds, int every) {
    Faults::get().delay_copies(seconds, every);
}

// Calls that copy do not return, in any context, as while the real driver loads a kernel behind a
// stream's wait; 0 ends this. Copies that were enqueued before are done.
DOUBLE_API void ficcoDoubleHoldCopies(int on) { Faults::get().hold_copies(on != 0); }

// Every operation of every stream first waits a random time; 0 seconds end this.
DOUBLE_API void ficcoDoubleJitter(unsigned seed, double max_seconds) {
    Faults::get().set_jitter(seed, max_seconds);
}

// Streams created from now on share the one queue of their context, whatever their priority.
DOUBLE_API void ficcoDoubleSingleQueue(int on) {
    Faults::get().set_queues({on != 0 ? 1U : 0U, false});
}

// Streams created from now on get so many hardware queues of their priority in turn; with 0 each
// has its own.
DOUBLE_API void ficcoDoubleQueues(unsigned count) { Faults::get().set_queues({count, true}); }

// How much was executed: "memcpy", "memcpy_bytes", "memset", "memop", "host", "graph",
// "kernel"; and of contexts that are not primary and of tensor maps, how many were made: "context",
// "tensormap".
DOUBLE_API unsigned long long ficcoDoubleCounts(const char* kind) {
    return Faults::get().counted(kind);
}

// Ends all faults and sets all counts to 0. Queues, memory and streams stay as they are.
DOUBLE_API void ficcoDoubleReset() { Faults::get().reset(); }
