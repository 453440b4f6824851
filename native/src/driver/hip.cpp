// The capabilities of devices, and one device as a Gpu.
#include "ficco/hip.hpp"

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ficco/hip_await.hpp"
#include "ficco/hip_code.hpp"
#include "ficco/hip_constants.hpp"
#include "ficco/hip_device.hpp"
#include "ficco/hip_memory.hpp"

namespace ficco::hip {

namespace {

Properties properties(int device) {
    Properties found{};
    call<&Table::hipGetDevicePropertiesR0600>(&found, device);
    return found;
}

[[noreturn]] void refuse(const std::string& what) { throw GpuError("HIP has no " + what); }

class HipGpu final : public Gpu {
  public:
    HipGpu(int device, const AwaitCode& await)
        : table_(library().table), device_(device), shared_bytes_(properties(device).shared_bytes) {
        const Current current(*this);
        int least = 0;
        call<&Table::hipDeviceGetStreamPriorityRange>(&least, &urgent_);
        if (await.code.empty()) {
            no_await_ = "no code for its architecture was given when the device was opened";
        } else {
            await_ = std::make_unique<AwaitKernel>(device, await.code, await.shared_bytes);
        }
    }

    GpuFacts facts() const noexcept override { return {}; }
    DeviceExtent extent() override {
        int threads = 0;
        call<&Table::hipDeviceGetAttribute>(&threads, kThreadsOfUnit, device_);
        return {properties(device_).compute_units, threads, clock_ticks_a_second(device_)};
    }
    std::shared_ptr<Gpu> apart() override {
        refuse("second context of a device; all its streams share the hardware queues");
    }
    // Each priority has hardware queues of its own (GPU_MAX_HW_QUEUES, 4 unless it is set).
    bool one_queue() const noexcept override { return false; }

    GpuStream new_stream(bool urgent) override {
        Stream stream = nullptr;
        call<&Table::hipStreamCreateWithPriority>(&stream, kStreamNonBlocking,
                                                  urgent ? urgent_ : 0);
        return stream;
    }
    void delete_stream(GpuStream stream) noexcept override {
        forget(table_.hipStreamDestroy(static_cast<Stream>(stream)));
    }
    bool idle(GpuStream stream) override {
        const Status status = table_.hipStreamQuery(static_cast<Stream>(stream));
        if (status == kNotReady) return false;
        check(status, name_of<&Table::hipStreamQuery>());
        return true;
    }

    GpuEvent new_event(bool timed) override {
        Event event = nullptr;
        call<&Table::hipEventCreateWithFlags>(&event, timed ? 0U : kEventDisableTiming);
        return event;
    }
    void delete_event(GpuEvent event) noexcept override {
        forget(table_.hipEventDestroy(static_cast<Event>(event)));
    }
    void record(GpuEvent event, GpuStream stream) override {
        call<&Table::hipEventRecord>(static_cast<Event>(event), static_cast<Stream>(stream));
    }
    void wait(GpuStream stream, GpuEvent event) override {
        call<&Table::hipStreamWaitEvent>(static_cast<Stream>(stream), static_cast<Event>(event),
                                         0U);
    }
    void synchronize(GpuEvent event) override {
        call<&Table::hipEventSynchronize>(static_cast<Event>(event));
    }
    double elapsed_us(GpuEvent begin, GpuEvent end) override {
        float ms = 0;
        call<&Table::hipEventElapsedTime>(&ms, static_cast<Event>(begin), static_cast<Event>(end));
        return 1e3 * static_cast<double>(ms);
    }

    // Whether a copy engine does it, and whether it is done at all, depends on the version of HIP;
    // a group must prove both before it relies on them.
    void copy(const BoxCopy& box, GpuStream stream) override {
        if (box.rows <= 0 || box.row_bytes <= 0) return;
        const bool adjacent =
            box.rows == 1 || (box.to_pitch == box.row_bytes && box.from_pitch == box.row_bytes);
        if (!adjacent) {
            refuse("copy by copy engines of " + std::to_string(box.rows) +
                   " rows that are not adjacent; copy each row");
        }
        call<&Table::hipMemcpyAsync>(pointer(box.to), static_cast<const void*>(pointer(box.from)),
                                     static_cast<std::size_t>(box.rows * box.row_bytes),
                                     kCopyWithoutComputeUnits, static_cast<Stream>(stream));
    }

    void words(std::span<const WordCommand>, GpuStream) override {
        refuse(
            "stores and waits of streams that leave compute units alone; copy constants, and "
            "wait by kernels");
    }
    GpuAddress constant(std::uint32_t value) override { return constant_word(device_, value); }
    const std::string& no_store() const noexcept override {
        static const std::string reason = "copies of constants raise words on AMD devices";
        return reason;
    }
    void store(std::span<const WordCommand>, GpuStream) override {
        refuse("kernel that stores words: " + no_store());
    }
    const std::string& no_await() const noexcept override { return no_await_; }
    void await(const KernelWait& wait, GpuStream stream) override {
        if (!await_) refuse("kernel that waits for words: " + no_await_);
        await_->launch(wait, static_cast<Stream>(stream));
    }

    void fill(GpuAddress address, unsigned char byte, std::size_t bytes,
              GpuStream stream) override {
        if (bytes == 0) return;
        call<&Table::hipMemsetAsync>(pointer(address), static_cast<int>(byte), bytes,
                                     static_cast<Stream>(stream));
    }
    void read(void* host, GpuAddress address, std::size_t bytes, GpuStream stream) override {
        call<&Table::hipMemcpyAsync>(host, static_cast<const void*>(pointer(address)), bytes,
                                     kCopyToHost, static_cast<Stream>(stream));
    }

    GpuKernel load_code(std::string_view code, const std::string& entry,
                        unsigned shared_bytes) override {
        if (shared_bytes > shared_bytes_) {
            throw GpuError("the kernel " + entry + " asks for " + std::to_string(shared_bytes) +
                           " bytes of shared memory, and the device has " +
                           std::to_string(shared_bytes_));
        }
        return hip::load_code(code, entry);
    }
    std::vector<std::size_t> load(GpuKernel kernel) override {
        return parameters_of(static_cast<Kernel>(kernel));
    }
    void launch(const KernelLaunch& launch, void** parameters, GpuStream stream) override {
        if (launch.chained) refuse("launch before the end of the previous kernel");
        const auto& [x, y, z] = launch.grid;
        call<&Table::hipModuleLaunchKernel>(static_cast<Kernel>(launch.kernel), x, y, z,
                                            launch.threads, 1U, 1U, launch.shared_bytes,
                                            static_cast<Stream>(stream), parameters,
                                            static_cast<void**>(nullptr));
    }
    TensorMap encode(const TensorBox&) override { refuse("tensor maps; pass addresses"); }

    GpuAddress new_window_memory(std::size_t bytes, WindowPart part) override {
        return hip::new_window_memory(device_, bytes, part);
    }
    void delete_window_memory(GpuAddress address) override {
        hip::delete_window_memory(device_, address);
    }
    void fill_words(GpuAddress address, std::uint32_t value, std::size_t count) override {
        hip::fill_words(device_, address, value, count);
    }
    void reach(int peer) override { hip::reach(device_, peer); }
    void synchronize_device() override { hip::synchronize(device_); }

    HostPage new_host_page(std::size_t bytes) override {
        HostPage page{};
        call<&Table::hipHostMalloc>(&page.host, bytes, kHostPortable | kHostMapped | kHostCoherent);
        void* device = nullptr;
        const Status status = table_.hipHostGetDevicePointer(&device, page.host, 0);
        if (status != kSuccess) {
            delete_host_page(page);
            check(status, name_of<&Table::hipHostGetDevicePointer>());
        }
        page.device = reinterpret_cast<GpuAddress>(device);
        return page;
    }
    void delete_host_page(const HostPage& page) noexcept override {
        forget(table_.hipHostFree(page.host));
    }

    bool capturing(GpuStream stream) override {
        int status = kCaptureNone;
        call<&Table::hipStreamIsCapturing>(static_cast<Stream>(stream), &status);
        if (status != kCaptureNone && status != kCaptureActive) {
            throw GpuError("the stream's capture has been invalidated by an earlier call");
        }
        return status == kCaptureActive;
    }
    GpuGraph capture(GpuStream stream, const std::function<void()>& enqueue) override;
    void replay(GpuGraph graph, GpuStream stream) override {
        call<&Table::hipGraphLaunch>(static_cast<GraphExec>(graph), static_cast<Stream>(stream));
    }
    void delete_graph(GpuGraph graph) noexcept override {
        forget(table_.hipGraphExecDestroy(static_cast<GraphExec>(graph)));
    }
    CapturedNodes captured_nodes(GpuStream stream, std::size_t known) override;

  protected:
    void push_current() override {
        int before = 0;
        call<&Table::hipGetDevice>(&before);
        call<&Table::hipSetDevice>(device_);
        before_.push_back(before);
    }
    void pop_current() noexcept override {
        forget(table_.hipSetDevice(before_.back()));
        before_.pop_back();
    }

  private:
    static inline thread_local std::vector<int> before_;  // current devices

    const Table& table_;
    const int device_;
    const std::size_t shared_bytes_;
    int urgent_ = 0;
    std::string no_await_;
    std::unique_ptr<const AwaitKernel> await_;
};

GpuGraph HipGpu::capture(GpuStream stream, const std::function<void()>& enqueue) {
    const auto captured = static_cast<Stream>(stream);
    call<&Table::hipStreamBeginCapture>(captured, kCaptureModeRelaxed);
    Graph graph = nullptr;
    try {
        enqueue();
    } catch (...) {
        forget(table_.hipStreamEndCapture(captured, &graph));
        if (graph != nullptr) forget(table_.hipGraphDestroy(graph));
        throw;
    }
    call<&Table::hipStreamEndCapture>(captured, &graph);
    GraphExec ready = nullptr;
    const Status made = table_.hipGraphInstantiateWithFlags(&ready, graph, 0);
    forget(table_.hipGraphDestroy(graph));
    check(made, name_of<&Table::hipGraphInstantiateWithFlags>());
    return ready;
}

CapturedNodes HipGpu::captured_nodes(GpuStream stream, std::size_t known) {
    int status = kCaptureNone;
    unsigned long long id = 0;
    Graph graph = nullptr;
    call<&Table::hipStreamGetCaptureInfo_v2>(static_cast<Stream>(stream), &status, &id, &graph,
                                             static_cast<const Node**>(nullptr),
                                             static_cast<std::size_t*>(nullptr));
    if (status != kCaptureActive) throw GpuError("the stream is not captured any more");
    CapturedNodes counts{0, 0, 0, id};
    call<&Table::hipGraphGetNodes>(graph, static_cast<Node*>(nullptr), &counts.total);
    if (known >= counts.total) return counts;
    std::vector<Node> nodes(counts.total);
    call<&Table::hipGraphGetNodes>(graph, nodes.data(), &counts.total);
    for (std::size_t i = known; i < counts.total; ++i) {
        int type = 0;
        call<&Table::hipGraphNodeGetType>(nodes[i], &type);
        counts.copies += type == kNodeMemcpy;
        counts.kernels += type == kNodeKernel;
    }
    return counts;
}

void check_ordinal(int device) {
    const int count = device_count();
    if (device < 0 || device >= count) {
        throw GpuError("there is no HIP device " + std::to_string(device) + "; the process has " +
                       std::to_string(count));
    }
}

}  // namespace

int device_count() {
    const Table& table = library().table;
    int count = 0;
    const Status status = table.hipGetDeviceCount(&count);
    if (status == kNoDevice || (status == kSuccess && count == 0)) {
        table.hipGetLastError();
        throw GpuError(
            "HIP finds no device; check HIP_VISIBLE_DEVICES, and that this user may "
            "open /dev/kfd");
    }
    check(status, name_of<&Table::hipGetDeviceCount>());
    return count;
}

Capabilities capabilities(int device) {
    check_ordinal(device);
    const Properties found = properties(device);
    const std::string arch = found.arch;
    Capabilities result{.name = found.name,
                        .arch = arch.substr(0, arch.find(':')),
                        .pci = {found.pci_domain, found.pci_bus, found.pci_device},
                        .compute_units = found.compute_units,
                        .warp = found.warp,
                        .memory_bytes = found.memory_bytes,
                        .shared_bytes = found.shared_bytes,
                        .peers = {}};
    for (int other = 0; other < device_count(); ++other) {
        int reaches = other == device;
        if (other != device) call<&Table::hipDeviceCanAccessPeer>(&reaches, device, other);
        result.peers.push_back(reaches != 0);
    }
    return result;
}

std::shared_ptr<Gpu> open_gpu(int device, const AwaitCode& await) {
    check_ordinal(device);
    return std::make_shared<HipGpu>(device, await);
}

}  // namespace ficco::hip
