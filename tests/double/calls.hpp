// What functions of all vendors' interfaces do. They throw the status of a refused call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call.hpp"
#include "work.hpp"

namespace ficco::driver_double {

// Enqueues the work on a stream.
void enqueue(Driver& driver, StreamHandle stream, Work work);
void enqueue_fill(Driver& driver, StreamHandle stream, Address target, std::uint32_t value,
                  std::size_t value_bytes, std::size_t count);
// Runs the work on the null stream and waits for it.
void run_now(Driver& driver, Lock& lock, Work work);

Address allocate(Driver& driver, Block::Kind kind, std::size_t bytes, Sharing sharing = {});
void free_device(Driver& driver, Lock& lock, Address address);
// Frees host memory without a wait for streams.
void free_host(Driver& driver, Block::Kind kind, void* address);

void create_stream(Driver& driver, StreamHandle* stream, unsigned flags, int priority);
Status query(Driver& driver, StreamHandle stream);
Status synchronize(Driver& driver, Lock& lock, StreamHandle stream);
// Waits until all work on the streams of a context has ended.
void synchronize(Driver& driver, Lock& lock, const std::shared_ptr<Context>& context);

void create_event(Driver& driver, EventHandle* event, unsigned flags);
void record(Driver& driver, EventHandle event, StreamHandle stream, unsigned flags);
void wait_for_event(Driver& driver, StreamHandle stream, EventHandle event, unsigned flags);
Status query_event(Driver& driver, EventHandle event);
Status synchronize_event(Driver& driver, Lock& lock, EventHandle event);
Status elapsed(Driver& driver, float* milliseconds, EventHandle start, EventHandle end);

void launch(Driver& driver, FunctionHandle function, const Shape& shape, StreamHandle stream,
            void** parameters, void** extra, unsigned most_shared);

void exchange_mode(int* mode);
void begin_capture(Driver& driver, StreamHandle stream, int mode);
void end_capture(Driver& driver, StreamHandle stream, GraphHandle* graph);
// Only the status must not be null.
void get_capture_info(Driver& driver, StreamHandle stream, int* status, std::uint64_t* id,
                      GraphHandle* graph, const NodeHandle** dependencies, std::size_t* count);
void get_nodes(Driver& driver, GraphHandle graph, NodeHandle* nodes, std::size_t* count);
void destroy_graph(Driver& driver, GraphHandle graph);
void instantiate(Driver& driver, ExecHandle* executable, GraphHandle graph);
void launch_graph(Driver& driver, ExecHandle executable, StreamHandle stream);

}  // namespace ficco::driver_double
