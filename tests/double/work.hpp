// The work of streams and graphs. Arguments and memory are checked when work is created, as by the
// real driver, and memory again when it runs, as by the real device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "abi.hpp"
#include "completion.hpp"
#include "context.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "objects.hpp"

namespace ficco::driver_double {

struct Place {
    Address address;
    Expect expect = Expect::kAny;
};

// The path of a copy to memory of other devices: direct, or through the host.
enum class Route { kPeerAccess, kHost };

// What does a copy: what NVIDIA's driver would choose, a copy engine, or a kernel of the device of
// the stream, which needs a multiprocessor.
enum class Engine { kDriver, kCopyEngine, kKernel };

// For work that runs: keeps memory alive. Without it, or without access to it, the context fails.
std::shared_ptr<Block> pin(const Context& context, Place place, std::size_t bytes,
                           Route route = Route::kPeerAccess);
std::byte* bytes_at(Address address);
// Stores a word at once, as a stream or a kernel does.
void store(Address address, std::uint32_t value, Context& context);

Work copy(Place target, Place source, std::size_t bytes, Route route = Route::kPeerAccess,
          Engine engine = Engine::kDriver);
Work copy_2d(const Copy2D& copy);
// These immediately refuse memory that the context cannot access.
Work fill(const Context& context, Address target, std::uint32_t value, std::size_t value_bytes,
          std::size_t count);
Work memory_operations(const Context& context, std::vector<MemOp> operations);
Work host_function(HostFunction function, void* data);
Work storing(const StoredWords& words, const Shape& shape);
Work awaiting(const AwaitedWords& words);
// Says of every block that it runs, in words at `begun`, then waits for the word `go`, or so long.
// Where it fills a device, kernels and copies within the device wait meanwhile.
Work holding(Address begun, Address go, std::uint64_t limit_ns, const Shape& shape);
Work kernel(const Kernel& kernel, const Shape& shape, void** parameters);
// Adds the number of words that differ from the value, once per block, to the word `wrong`.
Work comparing(Address data, std::uint64_t count, std::uint32_t value, Address wrong,
               const Shape& shape);
Work sleep(double seconds);
Work fail(Status status);
Work nothing(NodeType type);
Work mark();  // does nothing, but ends in stream order
Work wait_for(std::shared_ptr<Completion> completion);

// Nodes of a graph for an event that others record, or wait for, outside of the graph.
Work external_wait(std::shared_ptr<Event> event);
Work external_record(std::shared_ptr<Event> event);

}  // namespace ficco::driver_double
