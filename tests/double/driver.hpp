// The driver of the process: its devices, contexts, streams, events, graphs and memory. Environment
// variables configure it:
//
//   FICCO_DOUBLE_DEVICES=4   FICCO_DOUBLE_VERSION=13000 (or as HIP counts) FICCO_DOUBLE_PEERS=none
//   (may be left out)
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "abi.hpp"
#include "capture.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "objects.hpp"

namespace ficco::driver_double {

class Driver {
  public:
    static Driver& get();  // lives until the process ends

    struct Device {
        int retains = 0;
        ContextHandle handle = nullptr;  // of every primary context that it has, one after another
        std::shared_ptr<Context> context;  // the primary one; null if it is not retained
        unsigned context_flags = 0;
    };

    Device& device(int ordinal);
    int device_count() const { return static_cast<int>(devices_.size()); }

    std::shared_ptr<Context> retain(int ordinal);
    void release(int ordinal);
    void reset(int ordinal);  // destroys the context, even if it is retained

    // A context that is not primary. Memory that is allocated with it is the device's all the same,
    // and outlives it.
    std::shared_ptr<Context> create(int ordinal);
    // As the real driver, it stands as long as any stream of the device does, and no context is
    // made meanwhile: `lock` is that of the mutex, which is not held then.
    void destroy(ContextHandle handle, std::unique_lock<std::mutex>& lock);
    void await_destroyed(std::unique_lock<std::mutex>& lock);

    // The contexts that the calling thread has pushed.
    static std::vector<ContextHandle>& thread_contexts();
    // The top one. Throws Failure if there is none, or if it has failed.
    std::shared_ptr<Context> current();

    // The stream of a handle, or the null stream of the current context.
    std::shared_ptr<Stream> stream(StreamHandle handle);
    std::shared_ptr<Event> event(EventHandle handle);
    std::shared_ptr<Stream> make_stream(unsigned flags, int priority);
    void destroy_stream(StreamHandle handle);

    // Enqueues work, or captures it. Returns what tells of its end; null where it is captured, or
    // where there never was any.
    std::shared_ptr<Completion> submit(Stream& stream, Work work);
    // The last work of each stream of a context.
    std::vector<std::shared_ptr<Completion>> pending(const Context& context);

    const int version;        // as of cuDriverGetVersion
    const bool peers;         // whether devices may reach each other
    std::atomic<bool> ready;  // cuInit was called

    // Guards all that follows and the devices, but not the memory, which has a separate mutex. It
    // is not held during waits for work.
    std::mutex mutex;
    Registry<Context> contexts{kContextIsDestroyed};
    Registry<Stream> streams;
    Registry<Event> events;
    Registry<Graph> graphs;
    Registry<Node> nodes;
    Registry<Executable> executables;
    Captures captures{graphs, nodes};
    Memory memory;

  private:
    Driver();

    void end_context(const std::shared_ptr<Context>& context);
    std::condition_variable destroyed_;
    int being_destroyed_ = 0;

    static std::shared_ptr<Queue> queue_for(Context& context, int priority, bool& shared);

    std::vector<Device> devices_;
};

}  // namespace ficco::driver_double
