// Copies, fills, memory operations and host functions on host memory.
#include "work.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "arrivals.hpp"
#include "bell.hpp"
#include "call_log.hpp"
#include "driver.hpp"
#include "faults.hpp"
#include "multiprocessors.hpp"
#include "vendor.hpp"

namespace ficco::driver_double {

namespace {

using std::chrono::microseconds;

constexpr int kSpins = 200;
constexpr microseconds kShortestPause{50};
constexpr microseconds kLongestPause{400};
constexpr std::size_t kMostPitch = 0x7FFFFFFF;

// What NVIDIA's driver copies by kernels: within a device. Copies to peers have copy engines.
bool within_device(const std::shared_ptr<Block>& to, const std::shared_ptr<Block>& from) {
    return to && from && to->on_device() && from->on_device() && to->device == from->device;
}

// Copies bytes, which a running kernel of the target's device may see late.
void write_bytes(Address target, const std::byte* source, std::size_t bytes,
                 const std::shared_ptr<Block>& to, bool by_kernel, const Context& context) {
    Arrivals::get().arrive(reinterpret_cast<Address>(source), bytes);
    const bool own_kernel = by_kernel && to && to->device == context.device;
    if (to && to->on_device() && to->cached && !own_kernel) {
        Arrivals::get().write(to->device, target, source, bytes);
    } else {
        copy_bytes(target, source, bytes);
    }
}

bool reachable(const Context& context, const Block& block) {
    return !block.on_device() || context.may_touch(block.device);
}

// Refuses, when work is made, memory that does not live.
void check_known(Place place, std::size_t bytes) {
    std::shared_ptr<Block> block;
    if (!Driver::get().memory.find_bytes(place.address, bytes, place.expect, block)) {
        throw Failure{kInvalidValue};
    }
}

// The same, and memory that the context cannot reach.
void check_reachable(const Context& context, Address address, std::size_t bytes) {
    std::shared_ptr<Block> block;
    if (!Driver::get().memory.find_bytes(address, bytes, Expect::kKnown, block) ||
        !reachable(context, *block)) {
        throw Failure{kInvalidValue};
    }
}

// Rows of bytes, as one side of a 2-D copy has them.
struct Rows {
    Place begin;
    std::size_t pitch;

    std::size_t extent(std::size_t width, std::size_t height) const {
        return (height - 1) * pitch + width;
    }
};

template <class Side>
Rows rows(const Side& side, std::size_t width, std::size_t height) {
    Place begin{};
    switch (side.kind) {
        case kMemoryHost:
            begin = {reinterpret_cast<Address>(side.host), Expect::kAny};
            break;
        case kMemoryDevice:
            begin = {side.device, Expect::kKnown};
            break;
        case kMemoryUnified:
            begin = {side.device, Expect::kAny};
            break;
        default:
            throw Failure{kInvalidValue};  // arrays
    }
    // A single row needs no pitch.
    const bool none = side.pitch == 0 && height <= 1 && side.y == 0;
    if ((!none && side.pitch < side.x_bytes + width) || side.pitch > kMostPitch) {
        throw Failure{kInvalidValue};
    }
    begin.address += side.y * side.pitch + side.x_bytes;
    return {begin, side.pitch};
}

// The line of a copy in the log: rows of so many bytes.
std::string log_line_of_copy(Address target, Address source, std::size_t rows,
                             std::size_t row_bytes) {
    if (!CallLog::get().on()) return {};
    return "copy " + std::to_string(target) + " " + std::to_string(source) + " " +
           std::to_string(rows) + " " + std::to_string(row_bytes);
}

void count_copy(std::size_t bytes) {
    Faults::get().count("memcpy", 1);
    Faults::get().count("memcpy_bytes", bytes);
}

bool holds(std::uint32_t seen, std::uint32_t value, Comparison comparison) {
    switch (comparison) {
        case Comparison::kGreaterOrEqual:
            return static_cast<std::int32_t>(seen - value) >= 0;
        case Comparison::kEqual:
            return seen == value;
        case Comparison::kAnd:
            return (seen & value) != 0;
        case Comparison::kNor:
            return ~(seen | value) != 0;
    }
    return true;
}

// Whether memory is that of another device. Memory of the host belongs to the device whose context
// was current when it was allocated or registered: tests map peers' memory so.
bool of_other_device(const Context& context, Address address) {
    const auto block = Driver::get().memory.find(address);
    return block && block->device != context.device;
}

void check(const Context& context, const MemOp& operation) {
    if (operation.operation == kOpBarrier) return;
    const auto& word = operation.word;
    if (operation.operation != kOpWaitValue32 && operation.operation != kOpWriteValue32) {
        throw Failure{kNotSupported};
    }
    if (word.address % sizeof(std::uint32_t) != 0) throw Failure{kInvalidValue};
    check_reachable(context, word.address, sizeof(std::uint32_t));
    if (operation.operation == kOpWriteValue32) {
        if (word.flags != 0) throw Failure{kInvalidValue};
        const bool refused = Faults::get().peer_writes() == Faults::PeerWrites::kRefused;
        if (refused && of_other_device(context, word.address)) throw Failure{kNotSupported};
        return;
    }
    if ((word.flags & kWaitFlush) != 0) throw Failure{kNotSupported};
    if (word.flags > static_cast<unsigned>(Comparison::kNor)) throw Failure{kInvalidValue};
}

void run(const MemOp& operation, Context& context) {
    Faults::get().count("memop", 1);
    if (operation.operation == kOpBarrier) return;
    const auto& word = operation.word;
    const auto value = static_cast<std::uint32_t>(word.value);
    if (operation.operation == kOpWriteValue32) {
        const bool lost = Faults::get().peer_writes() == Faults::PeerWrites::kLost;
        if (!lost || !of_other_device(context, word.address)) store(word.address, value, context);
        return;
    }
    const auto block = pin(context, {word.address, Expect::kKnown}, sizeof(std::uint32_t));
    const std::atomic_ref<std::uint32_t> place(*reinterpret_cast<std::uint32_t*>(word.address));
    const auto comparison = static_cast<Comparison>(word.flags);
    const auto reached = [&] {
        return holds(place.load(std::memory_order_acquire), value, comparison);
    };
    for (int i = 0; i < kSpins; ++i) {
        if (reached()) return;
    }
    for (microseconds pause = kShortestPause; !reached() && !context.over();
         pause = std::min(2 * pause, kLongestPause)) {
        Bell::get().pause(pause);
    }
}

}  // namespace

std::shared_ptr<Block> pin(const Context& context, Place place, std::size_t bytes, Route route) {
    std::shared_ptr<Block> block;
    if (!Driver::get().memory.find_bytes(place.address, bytes, place.expect, block) ||
        (block && route == Route::kPeerAccess && !reachable(context, *block))) {
        throw Failure{kIllegalAddress};
    }
    return block;
}

std::byte* bytes_at(Address address) { return reinterpret_cast<std::byte*>(address); }

void store(Address address, std::uint32_t value, Context& context) {
    const auto block = pin(context, {address, Expect::kKnown}, sizeof(value));
    std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address))
        .store(value, std::memory_order_release);
    Bell::get().ring();
}

Work copy(Place target, Place source, std::size_t bytes, Route route, Engine engine) {
    if (bytes == 0) return nothing(NodeType::kMemcpy);
    check_known(target, bytes);
    check_known(source, bytes);
    return {
        NodeType::kMemcpy,
        [=](Context& context) {
            context.sleep(Faults::get().copy_delay());
            if (context.over()) return;
            const auto to = pin(context, target, bytes, route);
            const auto from = pin(context, source, bytes, route);
            const bool by_kernel =
                engine == Engine::kKernel || (engine == Engine::kDriver && within_device(to, from));
            if (by_kernel) {
                const int busy = engine == Engine::kKernel ? context.device : to->device;
                Multiprocessors::get().wait(busy, context);
            }
            count_copy(bytes);
            const bool signal = bytes == sizeof(std::uint32_t);
            const auto fault = of_other_device(context, target.address) ? Faults::get().copies()
                                                                        : Faults::Copies::kDone;
            if (fault == Faults::Copies::kSignalsLost && signal) return;
            if (fault == Faults::Copies::kDataLate && !signal) {
                std::thread([=] {  // it holds the memory
                    std::this_thread::sleep_for(std::chrono::seconds(1));
                    std::memmove(bytes_at(target.address), bytes_at(source.address), bytes);
                    static_cast<void>(to), static_cast<void>(from);
                })
                    .detach();
                return;
            }
            write_bytes(target.address, bytes_at(source.address), bytes, to, by_kernel, context);
        },
        log_line_of_copy(target.address, source.address, 1, bytes)};
}

Work copy_2d(const Copy2D& copy) {
    const std::size_t width = copy.width_bytes;
    const std::size_t height = copy.height;
    const Rows target = rows(copy.target, width, height);
    const Rows source = rows(copy.source, width, height);
    if (width == 0 || height == 0) return nothing(NodeType::kMemcpy);
    check_known(target.begin, target.extent(width, height));
    check_known(source.begin, source.extent(width, height));
    return {NodeType::kMemcpy,
            [=](Context& context) {
                context.sleep(Faults::get().copy_delay());
                if (context.over()) return;
                const auto to = pin(context, target.begin, target.extent(width, height));
                const auto from = pin(context, source.begin, source.extent(width, height));
                if (within_device(to, from)) Multiprocessors::get().wait(to->device, context);
                for (std::size_t row = 0; row < height; ++row) {
                    std::memmove(bytes_at(target.begin.address) + row * target.pitch,
                                 bytes_at(source.begin.address) + row * source.pitch, width);
                }
                count_copy(width * height);
            },
            log_line_of_copy(target.begin.address, source.begin.address, height, width)};
}

Work fill(const Context& context, Address target, std::uint32_t value, std::size_t value_bytes,
          std::size_t count) {
    if (target % value_bytes != 0) throw Failure{kInvalidValue};
    if (count == 0) return nothing(NodeType::kMemset);
    check_reachable(context, target, count * value_bytes);
    return {NodeType::kMemset, [=](Context& context) {
                const auto to = pin(context, {target, Expect::kKnown}, count * value_bytes);
                if (value_bytes == 1) std::memset(bytes_at(target), static_cast<int>(value), count);
                for (std::size_t i = 0; value_bytes > 1 && i < count; ++i) {
                    std::memcpy(bytes_at(target) + i * value_bytes, &value, value_bytes);
                }
                Faults::get().count("memset", 1);
            }};
}

Work memory_operations(const Context& context, std::vector<MemOp> operations) {
    for (const MemOp& operation : operations) check(context, operation);
    std::string log_line;
    for (const MemOp& operation : operations) {
        if (!CallLog::get().on() || operation.operation == kOpBarrier) continue;
        const bool writes = operation.operation == kOpWriteValue32;
        log_line += (log_line.empty() ? "" : "; ") + std::string(writes ? "write " : "wait ") +
                    std::to_string(operation.word.address) + " " +
                    std::to_string(static_cast<std::uint32_t>(operation.word.value));
    }
    return {NodeType::kBatchMemOp,
            [operations = std::move(operations)](Context& context) {
                for (const MemOp& operation : operations) {
                    if (!context.over()) run(operation, context);
                }
            },
            log_line};
}

Work host_function(HostFunction function, void* data) {
    if (function == nullptr) throw Failure{kInvalidValue};
    return {NodeType::kHost,
            [=](Context&) {
                function(data);
                Faults::get().count("host", 1);
            },
            "host"};
}

Work sleep(double seconds) {
    return {NodeType::kEmpty, [=](Context& context) { context.sleep(seconds); }};
}

Work fail(Status status) {
    return {NodeType::kEmpty, [=](Context&) { throw Failure{status}; }};
}

Work nothing(NodeType type) { return {type, nullptr}; }

Work mark() {
    return {NodeType::kEmpty, [](Context&) {}};
}

Work wait_for(std::shared_ptr<Completion> completion) {
    return {NodeType::kWaitEvent, [completion = std::move(completion)](Context& context) {
                completion->wait_unless([&] { return context.over(); });
            }};
}

Work external_wait(std::shared_ptr<Event> event) {
    return {NodeType::kWaitEvent, [event = std::move(event)](Context& context) {
                std::shared_ptr<Completion> last;
                {
                    const std::lock_guard lock(Driver::get().mutex);
                    last = event->last;
                }
                if (last) last->wait_unless([&] { return context.over(); });
            }};
}

Work external_record(std::shared_ptr<Event> event) {
    return {NodeType::kEventRecord, [event = std::move(event)](Context&) {
                const auto completion = std::make_shared<Completion>();
                completion->finish();
                const std::lock_guard lock(Driver::get().mutex);
                event->last = completion;
            }};
}

}  // namespace ficco::driver_double
