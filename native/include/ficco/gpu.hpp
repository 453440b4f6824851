// The engine's interface to a GPU, in terms of every vendor's driver. There is one implementation
// per vendor: cuda.hpp and hip.hpp. It is independent of plans, windows and ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ficco {

// A failed driver call; the message names the call and its status.
class GpuError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

using GpuAddress = std::uint64_t;
using GpuStream = void*;  // the vendor's handle; null is its default stream
using GpuEvent = void*;
using GpuGraph = void*;  // executable

// An operation of a stream on a 32-bit word, in order: store a value after all earlier work,
// visible to all devices and the host, or block the stream until the word equals the value.
struct WordCommand {
    enum class Kind { write, wait };
    Kind kind;
    GpuAddress address;
    std::uint32_t value;
};

// Maximum number of writes of one kernel.
inline constexpr std::size_t kMostStored = 128;

// A word that a kernel waits for, and its number in the word of `KernelWait::missed`.
struct AwaitedValue {
    GpuAddress address;
    std::uint32_t value;
    std::uint32_t number;  // 1 or more
};

// A wait by a kernel for at most kMostStored words. It gives up when the word `stop` is not 0, or
// after the limit; then it writes the largest number of a missing word to `missed`, if that word is
// smaller, and fills the data with bytes 0xFF, which are NaN. The word `lane` has the value `mark`
// from the kernel's begin to its end, and then 0.
struct KernelWait {
    std::span<const AwaitedValue> words;
    GpuAddress stop;
    GpuAddress lane;
    std::uint32_t mark;
    GpuAddress missed;
    std::uint64_t limit_ns;
    std::array<GpuAddress, 2> data;
    std::size_t data_bytes;  // of each, a multiple of 4
};

// Two-dimensional copy; a pitch is the distance between rows in bytes.
struct BoxCopy {
    GpuAddress to;
    std::int64_t to_pitch;
    GpuAddress from;
    std::int64_t from_pitch;
    std::int64_t rows;
    std::int64_t row_bytes;
};

// A loaded kernel and its launch parameters.
using GpuKernel = void*;  // the vendor's handle
struct KernelLaunch {
    GpuKernel kernel;
    std::array<unsigned, 3> grid;
    unsigned threads;       // of a block
    unsigned shared_bytes;  // dynamic, in addition to the kernel's static shared memory
    // Whether it may begin before the previous kernel has ended; it waits for that end by itself.
    bool chained = false;
};

// A matrix from which a kernel loads boxes in bulk. Type, swizzle and fill are the vendor's
// numbers.
struct TensorBox {
    GpuAddress address;
    std::int64_t pitch;  // bytes
    std::int64_t rows;
    std::int64_t cols;
    int box_rows;
    int box_cols;
    int element_bytes;
    int type;
    int swizzle;
    int fill;  // of elements beyond the matrix
    bool operator==(const TensorBox&) const = default;
};

// The vendor's encoding of a tensor box, a kernel argument.
struct alignas(128) TensorMap {
    std::array<std::byte, 128> bytes;
};

// The nodes of a graph.
struct CapturedNodes {
    std::size_t total;
    std::size_t copies;  // of those that were asked for, like `kernels`
    std::size_t kernels;
    std::uint64_t capture;  // unique in the process
};

// What the driver of a vendor can do. A call that needs a missing one throws GpuError, so callers
// ask first.
struct GpuFacts {
    bool words;        // streams store words and wait for words (`words`)
    bool tensor_maps;  // kernels load boxes in bulk (`encode`)
    bool chained;      // a kernel may begin before the previous one has ended
    bool apart;        // a device can be opened again, with queues of its own (`apart`)
};

// What a kernel needs to occupy all of a device, for so long.
struct DeviceExtent {
    int processors;                // multiprocessors, or compute units
    int threads_of_processor;      // at the same time
    std::uint64_t ticks_a_second;  // of the clock by which kernels bound their waits
};

// Parts of windows. Some vendors' kernels see what peers write to data after an acquire alone, and
// words, which kernels poll, in memory that is not cached.
enum class WindowPart { data, words };

// Memory of the host that the device can write to.
struct HostPage {
    void* host;
    GpuAddress device;
};

// One device. All calls except the constructor need a `Current` on the calling thread, and throw
// GpuError. It shares ownership with its users, so that a native thread may be the last owner
// without access to the Python object.
class Gpu : public std::enable_shared_from_this<Gpu> {
  public:
    // Makes the device current on the thread during its lifetime. Nested in another one of the same
    // Gpu it does nothing: what runs in between leaves the context as it was.
    class Current {
      public:
        explicit Current(Gpu& gpu) : gpu_(gpu), before_(of_thread_) {
            if (before_ != &gpu_) gpu_.push_current();
            of_thread_ = &gpu_;
        }
        ~Current() {
            of_thread_ = before_;
            if (before_ != &gpu_) gpu_.pop_current();
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        static inline thread_local Gpu* of_thread_ = nullptr;
        Gpu& gpu_;
        Gpu* const before_;
    };

    virtual ~Gpu() = default;

    virtual GpuFacts facts() const noexcept = 0;
    virtual DeviceExtent extent() = 0;

    // The same device and memory with separate hardware queues, which waits in this one do not
    // block. All callers share it; the first call opens it. It uses some of the device's memory
    // until the process ends.
    virtual std::shared_ptr<Gpu> apart() = 0;
    // Whether all streams share one hardware queue.
    virtual bool one_queue() const noexcept = 0;

    virtual GpuStream new_stream(bool urgent) = 0;
    virtual void delete_stream(GpuStream stream) noexcept = 0;
    virtual bool idle(GpuStream stream) = 0;

    virtual GpuEvent new_event(bool timed) = 0;
    virtual void delete_event(GpuEvent event) noexcept = 0;
    virtual void record(GpuEvent event, GpuStream stream) = 0;
    virtual void wait(GpuStream stream, GpuEvent event) = 0;
    virtual void synchronize(GpuEvent event) = 0;
    virtual double elapsed_us(GpuEvent begin, GpuEvent end) = 0;

    // Copies by a copy engine between devices, or from this one to another.
    virtual void copy(const BoxCopy& box, GpuStream stream) = 0;
    virtual void words(std::span<const WordCommand> commands, GpuStream stream) = 0;
    // The address of a word in the device's memory that holds the value until the process ends, so
    // that a copy of it raises a word elsewhere. It is allocated and written once per value, on a
    // separate stream, also while other streams are captured.
    virtual GpuAddress constant(std::uint32_t value) = 0;
    // Why there is no kernel for `store`; empty if there is one.
    virtual const std::string& no_store() const noexcept = 0;
    // The same for `await`.
    virtual const std::string& no_await() const noexcept = 0;
    // Writes up to kMostStored words by one kernel, after all earlier work, visible to all devices
    // and the host: first the leading ones with value 0, then the others in any order.
    virtual void store(std::span<const WordCommand> writes, GpuStream stream) = 0;
    // Waits for words by one kernel. What was written before a word is visible to later work.
    virtual void await(const KernelWait& wait, GpuStream stream) = 0;
    virtual void fill(GpuAddress address, unsigned char byte, std::size_t bytes,
                      GpuStream stream) = 0;
    virtual void read(void* host, GpuAddress address, std::size_t bytes, GpuStream stream) = 0;

    // Loads a compiled kernel from memory for launches with `shared_bytes` of dynamic shared
    // memory. It may wait for the device. The kernel is kept until the process ends.
    virtual GpuKernel load_code(std::string_view code, const std::string& entry,
                                unsigned shared_bytes) = 0;
    // Loads a kernel's code, which may wait for the device, and returns the size of each parameter.
    virtual std::vector<std::size_t> load(GpuKernel kernel) = 0;
    // `parameters`: the address of each. They are copied before it returns.
    virtual void launch(const KernelLaunch& launch, void** parameters, GpuStream stream) = 0;
    virtual TensorMap encode(const TensorBox& box) = 0;

    // Memory for windows, which is zero. It waits for the device.
    virtual GpuAddress new_window_memory(std::size_t bytes, WindowPart part) = 0;
    virtual void delete_window_memory(GpuAddress address) = 0;
    // Stores a word `count` times, and waits for that.
    virtual void fill_words(GpuAddress address, std::uint32_t value, std::size_t count) = 0;
    // Allows the device to access memory of a peer, by its number; a second call does nothing.
    virtual void reach(int peer) = 0;
    // Waits until the device has done all of its work.
    virtual void synchronize_device() = 0;

    virtual HostPage new_host_page(std::size_t bytes) = 0;
    virtual void delete_host_page(const HostPage& page) noexcept = 0;

    virtual bool capturing(GpuStream stream) = 0;
    // Captures the work that `enqueue` submits into a graph.
    virtual GpuGraph capture(GpuStream stream, const std::function<void()>& enqueue) = 0;
    virtual void replay(GpuGraph graph, GpuStream stream) = 0;
    // The driver keeps the graph until its launches have ended.
    virtual void delete_graph(GpuGraph graph) noexcept = 0;
    // Captures work, and launches the graph once.
    void launch_captured(GpuStream stream, const std::function<void()>& enqueue) {
        const GpuGraph graph = capture(stream, enqueue);
        try {
            replay(graph, stream);
        } catch (...) {
            delete_graph(graph);
            throw;
        }
        delete_graph(graph);
    }
    // The nodes of the graph that the stream is being captured into. The types of the first `known`
    // nodes are not looked at: a graph has many nodes, and only new ones behind them.
    virtual CapturedNodes captured_nodes(GpuStream stream, std::size_t known) = 0;
    static constexpr std::size_t kAllKnown = std::numeric_limits<std::size_t>::max();

  protected:
    virtual void push_current() = 0;
    virtual void pop_current() noexcept = 0;
};

}  // namespace ficco
