// Captures of streams into graphs: their streams, dependencies, and refused calls. Guarded by the
// driver's mutex, like all state that calls change.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "graph.hpp"
#include "objects.hpp"

namespace ficco::driver_double {

struct Capture {
    std::uint64_t id;
    std::shared_ptr<Graph> graph;
    StreamHandle origin;
    CaptureMode mode;
    std::thread::id thread;
    std::vector<std::shared_ptr<Stream>> streams;
    bool valid = true;
    bool active = true;
};

class Captures {
  public:
    Captures(Registry<Graph>& graphs, Registry<Node>& nodes) : graphs_(graphs), nodes_(nodes) {}

    void begin(const std::shared_ptr<Stream>& stream, CaptureMode mode);
    GraphHandle end(Stream& stream);

    // Replaces enqueuing on a capturing stream.
    void add_node(Stream& stream, Work work);
    void record(Stream& stream, Event& event);
    // Makes a stream wait for an event of a capture, so that it joins the capture.
    void wait(const std::shared_ptr<Stream>& stream, const Event& event);

    CaptureStatus status(const Stream& stream);

    // These throw the status of calls that are not allowed in a capture, and invalidate it.
    void refuse_stream(const Stream& stream);  // calls that query its work
    void refuse_event(const Event& event);
    void refuse_context(const Context& context);
    void refuse_unsafe();                           // calls that might wait, by the captures' modes
    void refuse_null_stream(const Stream& stream);  // while streams that it waits for capture

    void leave(const Stream& stream);  // at its destruction

    // The mode of the calling thread, which determines the calls that refuse_unsafe refuses.
    static CaptureMode& thread_mode();

  private:
    void check_valid(const Capture& capture) const;
    [[noreturn]] void invalidate(Capture& capture, Status status) const;
    void finish(Capture& capture);
    void discard(const Capture& capture);  // its graph
    bool blocks_null_stream(const Stream& stream, bool invalidate);

    Registry<Graph>& graphs_;
    Registry<Node>& nodes_;
    std::vector<std::shared_ptr<Capture>> active_;
    std::uint64_t captures_ = 0;
};

}  // namespace ficco::driver_double
