// The interface: code objects, and launches of their kernels.
#include <elf.h>

#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "hip_call.hpp"
#include "kernels.hpp"

using namespace ficco::driver_double;

namespace {

constexpr Status kInvalidImage = 200;
constexpr Status kNoBinary = 209;
constexpr Elf64_Half kAmdGpu = 224;              // EM_AMDGPU
constexpr std::string_view kDescriptor = ".kd";  // ends the symbol of a kernel's descriptor
constexpr unsigned kMostSharedBytes = 64U << 10;

// The kernels that the double runs by itself: the one that waits for words, with its parameters,
// and those of probes. Each has two parameters more than it uses.
constexpr std::string_view kAwait = "ficco_await_words";
constexpr std::string_view kHold = "ficco_hold";
constexpr std::string_view kCompare = "ficco_compare_words";
constexpr std::size_t kHoldBytes[] = {8, 8, 8, 8, 8};
constexpr std::size_t kCompareBytes[] = {8, 8, 8, 8, 8, 8};
constexpr std::size_t kAwaited = 32;
constexpr double kTicksANs = 0.1;  // of the constant clock
constexpr unsigned kL2s = 8;
constexpr unsigned kVendorWavefront = 64;

std::vector<std::size_t> await_bytes() {
    std::vector<std::size_t> bytes(kAwaited, 8);       // addresses
    bytes.insert(bytes.end(), 2 * kAwaited, 4);        // values and numbers
    bytes.insert(bytes.end(), {8, 8, 8, 8, 8, 8, 8});  // stop, lane, missed, ranges, size, limit
    bytes.insert(bytes.end(), {4, 4, 8, 8});           // mark, count, scratch
    return bytes;
}

AwaitedWords awaited_of(void** given) {
    AwaitedWords words{};
    void** next = given;
    const auto take = [&](auto& value) { std::memcpy(&value, *next++, sizeof(value)); };
    for (std::size_t i = 0; i < kAwaited; ++i) take(words.at[i]);
    for (std::size_t i = 0; i < kAwaited; ++i) take(words.value[i]);
    for (std::size_t i = 0; i < kAwaited; ++i) take(words.number[i]);
    for (Address* word : {&words.stop, &words.lane, &words.missed}) take(*word);
    for (Address& range : words.data) take(range);
    take(words.data_bytes);
    take(words.limit_ns);
    words.limit_ns = static_cast<std::uint64_t>(static_cast<double>(words.limit_ns) / kTicksANs);
    take(words.mark);
    take(words.count);
    return words;
}

// Kernels by module. Guarded by the driver's mutex.
using Names = std::set<std::string>;
std::map<ModuleHandle, Names>& modules() {
    static auto& modules = *new std::map<ModuleHandle, Names>;
    return modules;
}

template <class Value>
Value read(const char* at) {
    Value value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

// The kernels of a code object, which its symbols name.
Names kernels_of(const char* image) {
    if (std::memcmp(image, ELFMAG, SELFMAG) != 0) throw Failure{kInvalidImage};
    const auto header = read<Elf64_Ehdr>(image);
    if (header.e_machine != kAmdGpu) throw Failure{kNoBinary};
    const auto section = [&](std::size_t i) {
        return read<Elf64_Shdr>(image + header.e_shoff + i * sizeof(Elf64_Shdr));
    };
    Names found;
    for (std::size_t i = 0; i < header.e_shnum; ++i) {
        const Elf64_Shdr symbols = section(i);
        if (symbols.sh_type != SHT_SYMTAB && symbols.sh_type != SHT_DYNSYM) continue;
        const char* names = image + section(symbols.sh_link).sh_offset;
        for (std::size_t at = 0; at < symbols.sh_size; at += sizeof(Elf64_Sym)) {
            const auto symbol = read<Elf64_Sym>(image + symbols.sh_offset + at);
            const std::string_view name = names + symbol.st_name;
            if (!name.ends_with(kDescriptor)) continue;
            found.emplace(name.substr(0, name.size() - kDescriptor.size()));
        }
    }
    return found;
}

}  // namespace

DOUBLE_API Status hipModuleLoadData(ModuleHandle* module, const void* image) {
    return hip_call("hipModuleLoadData", [&](Driver& driver, Lock&) {
        driver.captures.refuse_unsafe();
        if (image == nullptr) throw Failure{kInvalidValue};
        Names names = kernels_of(static_cast<const char*>(image));
        modules()[out(module) = new_handle()] = std::move(names);
    });
}

DOUBLE_API Status hipModuleUnload(ModuleHandle module) {
    return hip_call("hipModuleUnload", [&](Driver&, Lock&) {
        if (modules().erase(module) == 0) throw Failure{kInvalidHandle};
    });
}

DOUBLE_API Status hipModuleGetFunction(FunctionHandle* function, ModuleHandle module,
                                       const char* name) {
    return hip_call("hipModuleGetFunction", [&](Driver& driver, Lock&) {
        const auto found = modules().find(module);
        if (found == modules().end()) throw Failure{kInvalidHandle};
        if (!found->second.contains(name)) throw Failure{kNotFound};
        const ContextHandle context = driver.current()->handle;
        if (name == kAwait) {
            out(function) = Kernels::get().add(Known::kAwaiting, await_bytes(), context);
        } else if (name == kHold) {
            out(function) = Kernels::get().add(Known::kHolding, kHoldBytes, context);
        } else if (name == kCompare) {
            out(function) = Kernels::get().add(Known::kComparing, kCompareBytes, context);
        } else {
            out(function) = Kernels::get().add(Known::kNone, {}, context);
        }
    });
}

DOUBLE_API Status hipModuleLaunchKernel(FunctionHandle function, unsigned grid_x, unsigned grid_y,
                                        unsigned grid_z, unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned shared_bytes,
                                        StreamHandle stream, void** parameters, void** extra) {
    return hip_call_on(stream, "hipModuleLaunchKernel", [&](Driver& driver, Lock&) {
        const Shape shape{grid_x, grid_y, grid_z, block_x * block_y * block_z, shared_bytes};
        const auto kernel = Kernels::get().find(function);
        AwaitedWords words;
        void* one[] = {&words};
        if (kernel != nullptr && kernel->known == Known::kAwaiting && parameters != nullptr) {
            // One program for each L2, or some parts of the device see old bytes later.
            if (grid_x < kL2s || block_x != kVendorWavefront) throw Failure{kInvalidValue};
            words = awaited_of(parameters);
            parameters = one;
        }
        launch(driver, function, shape, stream, parameters, extra, kMostSharedBytes);
    });
}

// Replaces a kernel of a code object, with parameters of so many bytes, by a host function.
DOUBLE_API Status ficcoDoubleStandInWith(FunctionHandle function, const std::size_t* bytes,
                                         int count, HostKernel run) {
    return call("ficcoDoubleStandInWith", [&](Driver&, Lock&) {
        Kernels::get().describe(function, {&out(bytes), static_cast<std::size_t>(count)});
        Kernels::get().stand_in(function, run);
    });
}

// The handle of a kernel with the parameters BEGUN, GO and LIMIT_NS: each of its blocks stores 1 to
// a word from BEGUN on, then the kernel waits for the word GO, or so long. With a thread for every
// slot of the device, nothing else that needs a compute unit begins meanwhile.
DOUBLE_API FunctionHandle ficcoDoubleHoldingKernel() {
    constexpr std::size_t kBytes[] = {8, 8, 8};
    return Kernels::get().add(Known::kHolding, kBytes, nullptr);
}
