// The interface: functions, launches, and tensor maps.
#include <string_view>

#include "calls.hpp"
#include "cubin.hpp"
#include "kernels.hpp"

using namespace ficco::driver_double;

namespace {

constexpr unsigned kMostSharedBytes = 232448;
constexpr int kAttributeMostShared = 8;

// By type of a tensor map's elements.
constexpr std::array<std::uint64_t, 10> kElementBytes{1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
// By swizzle: the most bytes of a row of a box.
constexpr std::array<std::uint64_t, 4> kMostBoxRowBytes{1U << 30, 32, 64, 128};
constexpr std::uint64_t kMostDim = 1ULL << 32;
constexpr std::uint64_t kMostPitch = 1ULL << 40;
constexpr std::uint64_t kAlign = 16;
constexpr std::uint64_t kMostBox = 256;
constexpr std::size_t kBank = 48;  // where offsets of parameters begin

// PTX is not run, so only kernels with known parameters are accepted.
struct KnownText {
    std::string_view name, parameters;
    Known known;
    std::vector<std::size_t> bytes;
};

const std::vector<KnownText>& known_texts() {
    static const auto& texts = *new std::vector<KnownText>{
        {"ficco_store_words",
         ".param .align 8 .b8 words[1544]",
         Known::kStoring,
         {sizeof(StoredWords)}},
        {"ficco_await_words",
         ".param .align 8 .b8 words[2112]",
         Known::kAwaiting,
         {sizeof(AwaitedWords)}},
        {"ficco_hold",
         ".param .u64 begun, .param .u64 go, .param .u64 limit_ns",
         Known::kHolding,
         {8, 8, 8}},
        {"ficco_compare_words",
         ".param .u64 data, .param .u64 count, .param .u64 value, .param .u64 wrong",
         Known::kComparing,
         {8, 8, 8, 8}},
        {"ficco_one", ".param .u64 word", Known::kOne, {8}},
    };
    return texts;
}

struct Module {
    ContextHandle context;  // in which it was loaded
    std::vector<const KnownText*> kernels;
    Cubin cubin;  // its kernels; empty for a text
};

// Modules by handle. Guarded by the driver's mutex.
std::map<ModuleHandle, Module>& modules() {
    static auto& modules = *new std::map<ModuleHandle, Module>;
    return modules;
}

std::vector<const KnownText*> kernels_of(std::string_view text) {
    std::vector<const KnownText*> found;
    if (!text.starts_with(".version ")) return found;
    for (const KnownText& kernel : known_texts()) {
        const std::string entry =
            ".entry " + std::string(kernel.name) + "(" + std::string(kernel.parameters) + ")";
        if (text.find(entry) != std::string_view::npos) found.push_back(&kernel);
    }
    return found;
}

bool within(std::uint64_t value, std::uint64_t most) { return value >= 1 && value <= most; }

}  // namespace

DOUBLE_API Status cuModuleLoadData(ModuleHandle* module, const void* image) {
    return call("cuModuleLoadData", [&](Driver& driver, Lock&) {
        const ContextHandle context = driver.current()->handle;
        driver.captures.refuse_unsafe();
        if (image == nullptr) throw Failure{kInvalidPtx};
        Module loaded{context, {}, {}};
        if (is_cubin(image)) {
            loaded.cubin = read_cubin(image);
            Faults::get().count("cubin", 1);
        } else {
            loaded.kernels = kernels_of(static_cast<const char*>(image));
            if (loaded.kernels.empty()) throw Failure{kInvalidPtx};
        }
        modules()[out(module) = new_handle()] = std::move(loaded);
    });
}

DOUBLE_API Status cuModuleUnload(ModuleHandle module) {
    return call("cuModuleUnload", [&](Driver& driver, Lock&) {
        driver.current();
        driver.captures.refuse_unsafe();
        if (modules().erase(module) == 0) throw Failure{kInvalidHandle};
    });
}

DOUBLE_API Status cuModuleGetFunction(FunctionHandle* function, ModuleHandle module,
                                      const char* name) {
    return call("cuModuleGetFunction", [&](Driver& driver, Lock&) {
        driver.current();
        const auto found = modules().find(module);
        if (found == modules().end()) throw Failure{kInvalidHandle};
        const Module& loaded = found->second;
        for (const KnownText* kernel : loaded.kernels) {
            if (name != kernel->name) continue;
            out(function) = Kernels::get().add(kernel->known, kernel->bytes, loaded.context);
            return;
        }
        const auto entry = loaded.cubin.find(name);
        if (entry == loaded.cubin.end()) throw Failure{kNotFound};
        out(function) = Kernels::get().add_code(loaded.context, entry->second);
    });
}

DOUBLE_API Status cuFuncSetAttribute(FunctionHandle function, int attribute, int value) {
    return call("cuFuncSetAttribute", [&](Driver& driver, Lock&) {
        driver.current();
        if (attribute != kAttributeMostShared) throw Failure{kNotSupported};
        if (value < 0 || static_cast<unsigned>(value) > kMostSharedBytes) {
            throw Failure{kInvalidValue};
        }
        Kernels::get().allow_shared(function, static_cast<unsigned>(value));
    });
}

DOUBLE_API Status cuFuncLoad(FunctionHandle function) {
    return call("cuFuncLoad", [&](Driver& driver, Lock&) {
        driver.current();
        driver.captures.refuse_unsafe();
        Kernels::get().find(function);
    });
}

DOUBLE_API Status cuFuncGetParamInfo(FunctionHandle function, std::size_t index,
                                     std::size_t* offset, std::size_t* bytes) {
    return call("cuFuncGetParamInfo", [&](Driver&, Lock&) {
        const auto kernel = Kernels::get().find(function);
        if (index >= kernel->parameters.size()) throw Failure{kInvalidValue};
        out(offset) = kBank + kernel->parameters[index].offset;  // as NVIDIA's driver counts
        if (bytes != nullptr) *bytes = kernel->parameters[index].bytes;
    });
}

DOUBLE_API Status cuLaunchKernel(FunctionHandle function, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned shared_bytes, StreamHandle stream,
                                 void** parameters, void** extra) {
    return call("cuLaunchKernel", [&](Driver& driver, Lock&) {
        const Shape shape{grid_x, grid_y, grid_z, block_x * block_y * block_z, shared_bytes};
        launch(driver, function, shape, stream, parameters, extra, kMostSharedBytes);
    });
}

// A chained kernel begins after the previous one, whose end it would wait for anyway.
DOUBLE_API Status cuLaunchKernelEx(const LaunchConfig* config, FunctionHandle function,
                                   void** parameters, void** extra) {
    return call("cuLaunchKernelEx", [&](Driver& driver, Lock&) {
        const auto& [grid, block, shared_bytes, stream, attributes, count] = *config;
        for (const LaunchAttribute& attribute : std::span(attributes, count)) {
            if (attribute.id != kLaunchChained) throw Failure{kNotSupported};
            if (attribute.value.number < 0 || attribute.value.number > 1) {
                throw Failure{kInvalidValue};
            }
            Faults::get().count("chained", 1);
        }
        const Shape shape{grid[0], grid[1], grid[2], block[0] * block[1] * block[2], shared_bytes};
        launch(driver, function, shape, stream, parameters, extra, kMostSharedBytes);
    });
}

// Of two dimensions, which are all that ficco has.
DOUBLE_API Status cuTensorMapEncodeTiled(TensorMap* map, int type, std::uint32_t rank,
                                         void* address, const std::uint64_t* dims,
                                         const std::uint64_t* pitches, const std::uint32_t* box,
                                         const std::uint32_t* every, int interleave, int swizzle,
                                         int promotion, int fill) {
    return call("cuTensorMapEncodeTiled", [&](Driver&, Lock&) {
        if (rank != 2) throw Failure{kNotSupported};
        const auto at = reinterpret_cast<Address>(address);
        if (reinterpret_cast<Address>(map) % alignof(TensorMap) != 0 || at == 0 ||
            at % kAlign != 0 || type < 0 || type >= static_cast<int>(kElementBytes.size()) ||
            swizzle < 0 || swizzle >= static_cast<int>(kMostBoxRowBytes.size()) ||
            interleave != 0 || promotion < 0 || promotion > 3 || fill < 0 || fill > 1) {
            throw Failure{kInvalidValue};
        }
        const std::uint64_t row_bytes = box[0] * kElementBytes[static_cast<std::size_t>(type)];
        if (!within(dims[0], kMostDim) || !within(dims[1], kMostDim) || pitches[0] % kAlign != 0 ||
            pitches[0] >= kMostPitch || !within(box[0], kMostBox) || !within(box[1], kMostBox) ||
            !within(every[0], 8) || !within(every[1], 8) || row_bytes % kAlign != 0 ||
            row_bytes > kMostBoxRowBytes[static_cast<std::size_t>(swizzle)]) {
            throw Failure{kInvalidValue};
        }
        out(map) = {at,
                    dims[0],
                    dims[1],
                    pitches[0],
                    box[0],
                    box[1],
                    static_cast<std::uint64_t>(type),
                    static_cast<std::uint64_t>(swizzle),
                    static_cast<std::uint64_t>(fill),
                    {}};
        Faults::get().count("tensormap", 1);
    });
}
