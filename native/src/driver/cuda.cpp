// The driver library, the capabilities of devices, and one device as a Gpu.
#include "ficco/cuda.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/cuda_code.hpp"
#include "ficco/cuda_constants.hpp"
#include "ficco/cuda_memory.hpp"
#include "ficco/cuda_words.hpp"

namespace ficco::cuda {

namespace {

constexpr std::size_t kMostMemOps = 255;  // maximum of one batch
using GetProcAddress = Status (*)(const char*, void**, int, std::uint64_t, int*);

// The driver's function with the interface of a CUDA version, or null.
void* find(GetProcAddress get, const char* name, int version) {
    void* function = nullptr;
    int answer = 0;
    return get(name, &function, version, 0, &answer) == kSuccess ? function : nullptr;
}

struct Library {
    void* handle = nullptr;
    GetProcAddress get = nullptr;
    Table table;
};

Library open_library() {
    Library library;
    library.handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library.handle == nullptr) {
        throw GpuError("libcuda.so.1 not found; install NVIDIA's driver");
    }
    library.get = reinterpret_cast<GetProcAddress>(dlsym(library.handle, "cuGetProcAddress_v2"));
    if (library.get == nullptr) {
        throw GpuError(
            "the driver has no cuGetProcAddress_v2, which CUDA 12.0 brought; install a "
            "newer driver");
    }
    std::string missing;
    const auto load = [&](const char* name, int version, int since) {
        void* function = find(library.get, name, version);
        if (function == nullptr) {
            missing += (missing.empty() ? "" : ", ") + std::string(name) + " (CUDA " +
                       std::to_string(since / 1000) + "." + std::to_string(since % 1000 / 10) + ")";
        }
        return function;
    };
#define FICCO_LOAD(name, version, since, arguments) \
    library.table.name =                            \
        reinterpret_cast<decltype(library.table.name)>(load(#name, version, since));
    FICCO_CUDA_FUNCTIONS(FICCO_LOAD)
#undef FICCO_LOAD
#define FICCO_LOAD(name, version, since, arguments) \
    library.table.name =                            \
        reinterpret_cast<decltype(library.table.name)>(find(library.get, #name, version));
    FICCO_CUDA_LAUNCH_FUNCTIONS(FICCO_LOAD)
#undef FICCO_LOAD
    if (!missing.empty()) {
        throw GpuError("the driver has no " + missing + "; install a newer driver");
    }
    if (const Status status = library.table.cuInit(0); status != kSuccess) {
        const char* name = nullptr;
        library.table.cuGetErrorName(status, &name);
        throw GpuError("cuInit answers " +
                       std::string(name == nullptr ? std::to_string(status) : name));
    }
    library.table.cuDriverGetVersion(&library.table.driver_version);
    return library;
}

const Library& library() {
    // Never freed: a thread may be blocked in the driver until the process has ended.
    static const Library& opened = *new Library(open_library());
    return opened;
}

// A context, and its release.
using HeldContext = std::unique_ptr<ContextTag, std::function<void(Context)>>;

// The primary context, which all libraries share.
HeldContext primary_context(Device device) {
    const Table& table_ = driver();
    Context context = nullptr;
    FICCO_CALL(cuDevicePrimaryCtxRetain, &context, device);
    return {context, [&table_, device](Context) { table_.cuDevicePrimaryCtxRelease(device); }};
}

HeldContext own_context(Device device) {
    const Table& table_ = driver();
    Context context = nullptr;
    FICCO_CALL(cuCtxCreate, &context, 0, device);
    HeldContext held(context, [&table_](Context own) { table_.cuCtxDestroy(own); });
    FICCO_CALL(cuCtxPopCurrent, &context);  // the creation has made it current
    return held;
}

bool has_one_queue() {
    const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return connections != nullptr && std::string_view(connections) == "1";
}

class CudaGpu final : public Gpu {
  public:
    CudaGpu(Device device, HeldContext context)
        : table_(driver()), device_(device), context_(std::move(context)) {
        const Current current(*this);
        int least = 0;
        FICCO_CALL(cuCtxGetStreamPriorityRange, &least, &urgent_);
    }

    // A device by its primary context.
    void load_kernels() {
        const Current current(*this);
        try {
            kernels_ = load_word_kernels(device_);
            no_store_.clear();
        } catch (const GpuError& error) {
            no_store_ = error.what();
        }
    }

    GpuFacts facts() const noexcept override {
        return {.words = true, .tensor_maps = true, .chained = true, .apart = true};
    }
    DeviceExtent extent() override {
        constexpr std::uint64_t kNsASecond = 1'000'000'000;  // kernels read nanoseconds
        DeviceExtent found{0, 0, kNsASecond};
        FICCO_CALL(cuDeviceGetAttribute, &found.processors, Attribute::kProcessors, device_);
        FICCO_CALL(cuDeviceGetAttribute, &found.threads_of_processor,
                   Attribute::kThreadsOfProcessor, device_);
        return found;
    }
    std::shared_ptr<Gpu> apart() override;
    bool one_queue() const noexcept override { return one_queue_; }

    GpuStream new_stream(bool urgent) override {
        Stream stream = nullptr;
        FICCO_CALL(cuStreamCreateWithPriority, &stream, kStreamNonBlocking, urgent ? urgent_ : 0);
        return stream;
    }
    void delete_stream(GpuStream stream) noexcept override {
        table_.cuStreamDestroy(static_cast<Stream>(stream));
    }
    bool idle(GpuStream stream) override {
        return ready(table_.cuStreamQuery(static_cast<Stream>(stream)), "cuStreamQuery");
    }

    GpuEvent new_event(bool timed) override {
        Event event = nullptr;
        FICCO_CALL(cuEventCreate, &event, timed ? 0 : kEventDisableTiming);
        return event;
    }
    void delete_event(GpuEvent event) noexcept override {
        table_.cuEventDestroy(static_cast<Event>(event));
    }
    void record(GpuEvent event, GpuStream stream) override {
        FICCO_CALL(cuEventRecord, static_cast<Event>(event), static_cast<Stream>(stream));
    }
    void wait(GpuStream stream, GpuEvent event) override {
        FICCO_CALL(cuStreamWaitEvent, static_cast<Stream>(stream), static_cast<Event>(event), 0);
    }
    void synchronize(GpuEvent event) override {
        FICCO_CALL(cuEventSynchronize, static_cast<Event>(event));
    }
    double elapsed_us(GpuEvent begin, GpuEvent end) override {
        float ms = 0;
        FICCO_CALL(cuEventElapsedTime, &ms, static_cast<Event>(begin), static_cast<Event>(end));
        return 1e3 * static_cast<double>(ms);
    }

    void copy(const BoxCopy& box, GpuStream stream) override {
        if (box.rows <= 0 || box.row_bytes <= 0) return;
        const auto bytes = static_cast<std::size_t>(box.rows * box.row_bytes);
        if (box.rows == 1 || (box.to_pitch == box.row_bytes && box.from_pitch == box.row_bytes)) {
            FICCO_CALL(cuMemcpyAsync, box.to, box.from, bytes, static_cast<Stream>(stream));
            return;
        }
        Copy2D plane{};
        plane.source_kind = plane.target_kind = kMemoryDevice;
        plane.source_device = box.from;
        plane.source_pitch = static_cast<std::size_t>(box.from_pitch);
        plane.target_device = box.to;
        plane.target_pitch = static_cast<std::size_t>(box.to_pitch);
        plane.width_bytes = static_cast<std::size_t>(box.row_bytes);
        plane.height = static_cast<std::size_t>(box.rows);
        FICCO_CALL(cuMemcpy2DAsync, &plane, static_cast<Stream>(stream));
    }

    void words(std::span<const WordCommand> commands, GpuStream stream) override {
        std::array<MemOp, kMostMemOps> batch;
        while (!commands.empty()) {
            const std::size_t count = std::min(commands.size(), kMostMemOps);
            for (std::size_t i = 0; i < count; ++i) {
                const bool waits = commands[i].kind == WordCommand::Kind::wait;
                batch[i] =
                    MemOp{.word = {waits ? kOpWaitValue32 : kOpWriteValue32, 0, commands[i].address,
                                   commands[i].value, waits ? kWaitEqual : 0, 0, 0}};
            }
            FICCO_CALL(cuStreamBatchMemOp, static_cast<Stream>(stream),
                       static_cast<unsigned>(count), batch.data(), 0);
            commands = commands.subspan(count);
        }
    }

    GpuAddress constant(std::uint32_t value) override { return constant_word(device_, value); }

    const std::string& no_store() const noexcept override { return no_store_; }
    const std::string& no_await() const noexcept override { return no_store_; }
    void store(std::span<const WordCommand> writes, GpuStream stream) override {
        launch_store_kernel(kernels_.store, writes, static_cast<Stream>(stream));
    }
    void await(const KernelWait& wait, GpuStream stream) override {
        launch_await_kernel(kernels_.await, wait, static_cast<Stream>(stream));
    }

    void fill(GpuAddress address, unsigned char byte, std::size_t bytes,
              GpuStream stream) override {
        if (bytes > 0) {
            FICCO_CALL(cuMemsetD8Async, address, byte, bytes, static_cast<Stream>(stream));
        }
    }
    void read(void* host, GpuAddress address, std::size_t bytes, GpuStream stream) override {
        FICCO_CALL(cuMemcpyDtoHAsync, host, address, bytes, static_cast<Stream>(stream));
    }

    GpuKernel load_code(std::string_view code, const std::string& entry,
                        unsigned shared_bytes) override {
        return cuda::load_code(device_, code, entry, shared_bytes);
    }
    std::vector<std::size_t> load(GpuKernel kernel) override {
        if (table_.cuFuncLoad == nullptr || table_.cuFuncGetParamInfo == nullptr) {
            throw GpuError(
                "a kernel's parameters can be asked for from CUDA 12.4 on, and the driver serves " +
                std::to_string(table_.driver_version / 1000) + "." +
                std::to_string(table_.driver_version % 1000 / 10) +
                "; install a newer driver, or launch the kernel by its own library");
        }
        const auto function = static_cast<Function>(kernel);
        FICCO_CALL(cuFuncLoad, function);
        std::vector<std::size_t> sizes;
        while (true) {
            std::size_t offset = 0;  // relative to the aligned start, not to the first parameter
            std::size_t bytes = 0;
            const Status status =
                table_.cuFuncGetParamInfo(function, sizes.size(), &offset, &bytes);
            if (status == kInvalidValue && !sizes.empty()) return sizes;  // no more parameters
            check(status, "cuFuncGetParamInfo");
            sizes.push_back(bytes);
        }
    }
    void launch(const KernelLaunch& launch, void** parameters, GpuStream stream) override {
        const auto function = static_cast<Function>(launch.kernel);
        const auto& [x, y, z] = launch.grid;
        if (!launch.chained) {
            FICCO_CALL(cuLaunchKernel, function, x, y, z, launch.threads, 1, 1, launch.shared_bytes,
                       static_cast<Stream>(stream), parameters, nullptr);
            return;
        }
        LaunchAttribute chained{kLaunchChained, 0, {1}};
        const LaunchConfig config{{x, y, z},
                                  {launch.threads, 1, 1},
                                  launch.shared_bytes,
                                  static_cast<Stream>(stream),
                                  &chained,
                                  1};
        FICCO_CALL(cuLaunchKernelEx, &config, function, parameters, nullptr);
    }
    ficco::TensorMap encode(const TensorBox& box) override {
        // The contiguous dimension comes first.
        const std::array dims{static_cast<std::uint64_t>(box.cols),
                              static_cast<std::uint64_t>(box.rows)};
        const std::array pitches{static_cast<std::uint64_t>(box.pitch)};
        const std::array boxes{static_cast<std::uint32_t>(box.box_cols),
                               static_cast<std::uint32_t>(box.box_rows)};
        const std::array<std::uint32_t, 2> every{1, 1};
        TensorMap map{};
        FICCO_CALL(cuTensorMapEncodeTiled, &map, box.type, 2, reinterpret_cast<void*>(box.address),
                   dims.data(), pitches.data(), boxes.data(), every.data(), kInterleaveNone,
                   box.swizzle, kPromoteTo128Bytes, box.fill);
        return std::bit_cast<ficco::TensorMap>(map);
    }

    GpuAddress new_window_memory(std::size_t bytes, WindowPart) override {
        return cuda::new_window_memory(bytes);
    }
    void delete_window_memory(GpuAddress address) override { cuda::delete_window_memory(address); }
    void fill_words(GpuAddress address, std::uint32_t value, std::size_t count) override {
        cuda::fill_words(address, value, count);
    }
    void reach(int peer) override { cuda::reach(peer); }
    void synchronize_device() override { cuda::synchronize(); }

    HostPage new_host_page(std::size_t bytes) override {
        HostPage page{};
        FICCO_CALL(cuMemHostAlloc, &page.host, bytes, kHostAllocPortable | kHostAllocMapped);
        Pointer device = 0;
        FICCO_CALL(cuMemHostGetDevicePointer, &device, page.host, 0);
        page.device = device;
        return page;
    }
    void delete_host_page(const HostPage& page) noexcept override {
        table_.cuMemFreeHost(page.host);
    }

    bool capturing(GpuStream stream) override {
        int status = kCaptureNone;
        FICCO_CALL(cuStreamIsCapturing, static_cast<Stream>(stream), &status);
        if (status != kCaptureNone && status != kCaptureActive) {
            throw GpuError("the stream's capture has been invalidated by an earlier call");
        }
        return status == kCaptureActive;
    }

    GpuGraph capture(GpuStream stream, const std::function<void()>& enqueue) override {
        const auto captured = static_cast<Stream>(stream);
        FICCO_CALL(cuStreamBeginCapture, captured, kCaptureModeRelaxed);
        Graph graph = nullptr;
        try {
            enqueue();
        } catch (...) {
            table_.cuStreamEndCapture(captured, &graph);
            if (graph != nullptr) table_.cuGraphDestroy(graph);
            throw;
        }
        FICCO_CALL(cuStreamEndCapture, captured, &graph);
        GraphExec ready = nullptr;
        const Status made = table_.cuGraphInstantiateWithFlags(&ready, graph, 0);
        table_.cuGraphDestroy(graph);
        check(made, "cuGraphInstantiateWithFlags");
        return ready;
    }
    void replay(GpuGraph graph, GpuStream stream) override {
        FICCO_CALL(cuGraphLaunch, static_cast<GraphExec>(graph), static_cast<Stream>(stream));
    }
    void delete_graph(GpuGraph graph) noexcept override {
        table_.cuGraphExecDestroy(static_cast<GraphExec>(graph));
    }

    CapturedNodes captured_nodes(GpuStream stream, std::size_t known) override {
        int status = kCaptureNone;
        Graph graph = nullptr;
        CapturedNodes counts{};
        FICCO_CALL(cuStreamGetCaptureInfo, static_cast<Stream>(stream), &status, &counts.capture,
                   &graph, nullptr, nullptr);
        if (status != kCaptureActive) throw GpuError("the stream is not captured any more");
        FICCO_CALL(cuGraphGetNodes, graph, nullptr, &counts.total);
        if (known >= counts.total) return counts;
        std::vector<Node> nodes(counts.total);
        FICCO_CALL(cuGraphGetNodes, graph, nodes.data(), &counts.total);
        for (std::size_t i = known; i < counts.total; ++i) {
            int type = 0;
            FICCO_CALL(cuGraphNodeGetType, nodes[i], &type);
            counts.copies += type == kNodeMemcpy;
            counts.kernels += type == kNodeKernel;
        }
        return counts;
    }

  protected:
    void push_current() override { FICCO_CALL(cuCtxPushCurrent, context_.get()); }
    void pop_current() noexcept override {
        Context popped = nullptr;
        table_.cuCtxPopCurrent(&popped);
    }

  private:
    static bool ready(Status status, const char* call) {
        if (status == kNotReady) return false;
        check(status, call);
        return true;
    }

    const Table& table_;
    const Device device_;
    const HeldContext context_;
    const bool one_queue_ = has_one_queue();  // read once, as in the driver
    int urgent_ = 0;
    WordKernels kernels_;
    std::string no_store_ = "kernels are loaded where the device is opened first";
};

// Never destroyed: the driver destroys a context only when no stream of the device waits, and opens
// no other context meanwhile, which would block the release of streams.
std::shared_ptr<Gpu> CudaGpu::apart() {
    struct Apart {
        std::mutex mutex;  // opening one device does not block the opening of others
        std::shared_ptr<Gpu> gpu;
    };
    static std::mutex mutex;
    static auto* const opened = new std::map<Device, Apart>;
    Apart& apart = [&]() -> Apart& {
        const std::lock_guard lock(mutex);
        return (*opened)[device_];
    }();
    const std::lock_guard lock(apart.mutex);
    if (!apart.gpu) apart.gpu = std::make_shared<CudaGpu>(device_, own_context(device_));
    return apart.gpu;
}

}  // namespace

const Table& driver() { return library().table; }

void check(Status status, const char* call) {
    if (status == kSuccess) return;
    const char* name = nullptr;
    const char* text = nullptr;
    driver().cuGetErrorName(status, &name);
    driver().cuGetErrorString(status, &text);
    throw GpuError(std::string(call) + " answers " +
                   (name == nullptr ? std::to_string(status) : name) +
                   (text == nullptr ? "" : std::string(": ") + text));
}

int device_count() {
    int count = 0;
    check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
    return count;
}

Capabilities capabilities(int ordinal) {
    const Table& table_ = driver();
    Device device = 0;
    FICCO_CALL(cuDeviceGet, &device, ordinal);
    const auto attribute = [&](Attribute which) {
        int value = 0;
        FICCO_CALL(cuDeviceGetAttribute, &value, which, device);
        return value;
    };
    std::array<char, 256> name{};
    FICCO_CALL(cuDeviceGetName, name.data(), static_cast<int>(name.size()), device);
    Capabilities result{
        .name = name.data(),
        .major = attribute(Attribute::kMajor),
        .minor = attribute(Attribute::kMinor),
        .pci = {attribute(Attribute::kPciDomain), attribute(Attribute::kPciBus),
                attribute(Attribute::kPciDevice)},
        .copy_engines = attribute(Attribute::kAsyncEngineCount),
        .flush_remote_writes = attribute(Attribute::kCanFlushRemoteWrites) != 0,
        .batch_copy_12_8 = find(library().get, "cuMemcpyBatchAsync", 12080) != nullptr,
        .batch_copy_13_0 = find(library().get, "cuMemcpyBatchAsync", 13000) != nullptr,
        .peers = {}};
    for (int other = 0; other < device_count(); ++other) {
        Device there = 0;
        int reaches = other == ordinal;
        FICCO_CALL(cuDeviceGet, &there, other);
        if (other != ordinal) FICCO_CALL(cuDeviceCanAccessPeer, &reaches, device, there);
        result.peers.push_back(reaches != 0);
    }
    return result;
}

std::shared_ptr<Gpu> open_gpu(int ordinal) {
    const Table& table_ = driver();
    Device device = 0;
    FICCO_CALL(cuDeviceGet, &device, ordinal);
    auto gpu = std::make_shared<CudaGpu>(device, primary_context(device));
    gpu->load_kernels();
    return gpu;
}

}  // namespace ficco::cuda
