// What the engine asks of a GPU, in words that every vendor's driver has. One implementation a
// vendor: cuda.hpp. Nothing here knows plans, windows or ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ficco {

// A call of the driver that failed; the message says which and what it answered.
class GpuError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

using GpuAddress = std::uint64_t;
using GpuStream = void*;  // the vendor's handle; null is its default stream
using GpuEvent = void*;

// What a stream does with a 32-bit word, in order: store a value behind all that came before it,
// visible to all devices and the host, or hold the stream until the word is equal to it.
struct WordCommand {
    enum class Kind { write, wait };
    Kind kind;
    GpuAddress address;
    std::uint32_t value;
};

// Writes that one kernel does, at most.
inline constexpr std::size_t kMostStored = 128;

// Two-dimensional copy; a pitch is the distance between rows in bytes.
struct BoxCopy {
    GpuAddress to;
    std::int64_t to_pitch;
    GpuAddress from;
    std::int64_t from_pitch;
    std::int64_t rows;
    std::int64_t row_bytes;
};

// A kernel that somebody else has loaded, and how it is started.
using GpuKernel = void*;  // the vendor's handle
struct KernelLaunch {
    GpuKernel kernel;
    std::array<unsigned, 3> grid;
    unsigned threads;       // of a block
    unsigned shared_bytes;  // beside what the kernel has by itself
    // Whether it may begin while the kernel before it ends, for whose end it waits by itself.
    bool chained = false;
};

// A matrix of which a kernel loads boxes in bulk. Numbers of type, swizzle and fill are the
// vendor's.
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

// What the vendor makes of one, to be given to kernels.
struct alignas(128) TensorMap {
    std::array<std::byte, 128> bytes;
};

// What a graph holds.
struct CapturedNodes {
    std::size_t copies;
    std::size_t kernels;
    std::uint64_t capture;  // which one; no other of the process has its number
};

// Memory of the host that the device can write to.
struct HostPage {
    void* host;
    GpuAddress device;
};

// One device. All calls but the constructor's need a `Current` on the calling thread, and throw
// GpuError. It knows who shares it, so that a thread of native code that is the last to hold one
// has nothing to do with Python, whose object it may have been.
class Gpu : public std::enable_shared_from_this<Gpu> {
  public:
    // Makes the device the thread's while it lives. Within another one of the same Gpu it has
    // nothing to do: no code but ours runs meanwhile.
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

    // The same device, with hardware queues of its own: what waits here holds up nothing there.
    // Memory is the same. There is one for all who ask, opened when it is first asked for. It takes
    // some of the device's memory until the process ends.
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

    // By a copy engine between devices, or from this one to another.
    virtual void copy(const BoxCopy& box, GpuStream stream) = 0;
    virtual void words(std::span<const WordCommand> commands, GpuStream stream) = 0;
    // The address of a word in the device's memory that holds the value until the process ends, so
    // that a copy of it raises a word elsewhere. It is allocated and written once per value, on a
    // stream of its own, also while other streams are captured.
    virtual GpuAddress constant(std::uint32_t value) = 0;
    // Why it has no kernel for `store`; empty where it has one.
    virtual const std::string& no_store() const noexcept = 0;
    // Writes up to kMostStored words by one kernel, behind all that came before, visible to all
    // devices and the host: those at the beginning whose value is 0, then the others, in no order
    // among themselves.
    virtual void store(std::span<const WordCommand> writes, GpuStream stream) = 0;
    virtual void fill(GpuAddress address, unsigned char byte, std::size_t bytes,
                      GpuStream stream) = 0;
    virtual void read(void* host, GpuAddress address, std::size_t bytes, GpuStream stream) = 0;

    // Loads a compiled kernel from memory, which may wait for the device, for launches with so many
    // bytes of dynamic shared memory. It is kept until the process ends.
    virtual GpuKernel load_code(std::string_view code, const std::string& entry,
                                unsigned shared_bytes) = 0;
    // Loads a kernel's code, which may wait for the device, and says how many bytes each of its
    // parameters has.
    virtual std::vector<std::size_t> load(GpuKernel kernel) = 0;
    // `parameters`: the address of each. They are copied at once.
    virtual void launch(const KernelLaunch& launch, void** parameters, GpuStream stream) = 0;
    virtual TensorMap encode(const TensorBox& box) = 0;

    virtual HostPage new_host_page(std::size_t bytes) = 0;
    virtual void delete_host_page(const HostPage& page) noexcept = 0;

    virtual bool capturing(GpuStream stream) = 0;
    // Captures what `enqueue` submits to the stream into a graph, and launches the graph once.
    virtual void launch_captured(GpuStream stream, const std::function<void()>& enqueue) = 0;
    // In the graph that the stream is captured into.
    virtual CapturedNodes captured_nodes(GpuStream stream) = 0;

  protected:
    virtual void push_current() = 0;
    virtual void pop_current() noexcept = 0;
};

}  // namespace ficco
