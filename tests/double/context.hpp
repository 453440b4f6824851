// A context of a device: the primary one, from its first retain to its last release, or another.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "abi.hpp"

namespace ficco::driver_double {

class Context;
class Queue;
struct Stream;

// An operation of a stream or a node of a graph. Its body throws Failure to make its context fail,
// and is null if there is nothing to do, as in a copy of no bytes. `log_line` is its line in the
// log of calls; a work without one is not logged.
struct Work {
    NodeType type;
    std::function<void(Context&)> body;
    std::string log_line = {};
};

class Context {
  public:
    Context(int device, ContextHandle handle, bool primary)
        : device(device), handle(handle), primary(primary) {}

    const int device;
    const ContextHandle handle;
    const bool primary;

    // Created at the first use, and guarded by the driver's mutex.
    std::shared_ptr<Stream> null_stream;
    // Hardware queues by priority, and how many streams have been given one.
    struct QueuePool {
        std::vector<std::shared_ptr<Queue>> queues;
        std::size_t streams = 0;
    };
    std::map<int, QueuePool> shared_queues;

    // Runs the work, unless the context has failed; an exception of the body makes it fail.
    void run(const Work& work);
    void sleep(double seconds) const;  // in the middle of work, so it ends when the context does

    void fail(Status status);  // only the first status is stored
    void end() { ended_ = true; }
    Status status() const { return status_; }
    // Whether execution has stopped; waits then give up.
    bool over() const { return ended_ || status_ != kSuccess; }

    bool may_touch(int other) const { return other == device || ((peers_ >> other) & 1) != 0; }
    void allow_peer(int other, bool allow);

  private:
    std::atomic<bool> ended_ = false;
    std::atomic<Status> status_ = kSuccess;
    std::atomic<std::uint64_t> peers_ = 0;  // a bit per device
};

}  // namespace ficco::driver_double
