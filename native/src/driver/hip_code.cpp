// Reading and loading code objects. Their metadata are MessagePack in a note of the ELF file (see
// "Code Object V5 Metadata" in LLVM's user guide for AMDGPU).
#include "ficco/hip_code.hpp"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "ficco/hip.hpp"

namespace ficco::hip {

namespace {

constexpr std::string_view kElf = "\177ELF";
constexpr std::string_view kOwner{"AMDGPU\0", 7};
constexpr std::uint32_t kMetadataNote = 32;  // NT_AMDGPU_METADATA
constexpr Elf64_Half kAmdGpu = 224;          // EM_AMDGPU

// The bytes of a part of a file. Throws GpuError if the file is shorter.
std::string_view part(std::string_view file, std::size_t offset, std::size_t bytes) {
    if (offset > file.size() || bytes > file.size() - offset) {
        throw GpuError("the code object is cut short");
    }
    return file.substr(offset, bytes);
}

template <class Value>
Value read(std::string_view file, std::size_t offset) {
    Value value;
    std::memcpy(&value, part(file, offset, sizeof(value)).data(), sizeof(value));
    return value;
}

// Reads the values of a MessagePack text, in order.
class Unpacker {
  public:
    explicit Unpacker(std::string_view text) : rest_(text) {}

    std::size_t map() { return count(0x80, 0xde); }
    std::size_t array() { return count(0x90, 0xdc); }

    std::string_view text() {
        const unsigned kind = next();
        if ((kind & 0xe0U) == 0xa0) return take(kind & 0x1fU);
        if (kind < 0xd9 || kind > 0xdb) wrong();
        return take(number_of(std::size_t{1} << (kind - 0xd9)));
    }

    std::uint64_t number() {
        const unsigned kind = next();
        if (kind < 0x80) return kind;
        if (kind < 0xcc || kind > 0xcf) wrong();
        return number_of(std::size_t{1} << (kind - 0xcc));
    }

    void skip() {
        const unsigned kind = peek();
        if ((kind & 0xf0U) == 0x80 || kind == 0xde || kind == 0xdf) {
            skip_many(2 * map());
        } else if ((kind & 0xf0U) == 0x90 || kind == 0xdc || kind == 0xdd) {
            skip_many(array());
        } else if ((kind & 0xe0U) == 0xa0 || (kind >= 0xd9 && kind <= 0xdb)) {
            text();
        } else if (kind < 0x80 || (kind >= 0xcc && kind <= 0xcf)) {
            number();
        } else {
            next();
            if (kind == 0xc0 || kind == 0xc2 || kind == 0xc3 || kind >= 0xe0) return;
            if (kind >= 0xd0 && kind <= 0xd3) {
                take(std::size_t{1} << (kind - 0xd0));
            } else {
                wrong();
            }
        }
    }

  private:
    [[noreturn]] static void wrong() {
        throw GpuError("the metadata of the code object are not as LLVM writes them");
    }

    // Elements of a map or an array, whose short form begins with `few`.
    std::size_t count(unsigned few, unsigned many) {
        const unsigned kind = next();
        if ((kind & 0xf0U) == few) return kind & 0x0fU;
        if (kind != many && kind != many + 1) wrong();
        return number_of(kind == many ? 2 : 4);
    }

    void skip_many(std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) skip();
    }

    unsigned peek() const { return static_cast<unsigned char>(part(rest_, 0, 1).front()); }
    unsigned next() {
        const unsigned byte = peek();
        rest_.remove_prefix(1);
        return byte;
    }
    std::string_view take(std::size_t bytes) {
        const std::string_view taken = part(rest_, 0, bytes);
        rest_.remove_prefix(bytes);
        return taken;
    }
    std::uint64_t number_of(std::size_t bytes) {  // the highest byte first
        std::uint64_t value = 0;
        for (const char byte : take(bytes)) value = value << 8 | static_cast<unsigned char>(byte);
        return value;
    }

    std::string_view rest_;
};

std::string_view metadata_of(std::string_view code) {
    const auto header = read<Elf64_Ehdr>(code, 0);
    for (std::size_t i = 0; i < header.e_shnum; ++i) {
        const auto section = read<Elf64_Shdr>(code, header.e_shoff + i * sizeof(Elf64_Shdr));
        if (section.sh_type != SHT_NOTE) continue;
        const std::string_view notes = part(code, section.sh_offset, section.sh_size);
        for (std::size_t at = 0; at + sizeof(Elf64_Nhdr) <= notes.size();) {
            const auto note = read<Elf64_Nhdr>(notes, at);
            const auto padded = [](std::size_t bytes) { return (bytes + 3) / 4 * 4; };
            const std::size_t name = at + sizeof(note);
            const std::size_t begin = name + padded(note.n_namesz);
            if (note.n_type == kMetadataNote && part(notes, name, note.n_namesz) == kOwner) {
                return part(notes, begin, note.n_descsz);
            }
            at = begin + padded(note.n_descsz);
        }
    }
    throw GpuError("the code object has no metadata of AMDGPU");
}

// One parameter; nothing if HIP fills it in.
std::optional<std::size_t> read_parameter(Unpacker& unpacker) {
    std::size_t bytes = 0;
    bool hidden = false;
    for (std::size_t fields = unpacker.map(); fields > 0; --fields) {
        const std::string_view field = unpacker.text();
        if (field == ".size") {
            bytes = unpacker.number();
        } else if (field == ".value_kind") {
            hidden = unpacker.text().starts_with("hidden_");
        } else {
            unpacker.skip();
        }
    }
    if (hidden) return std::nullopt;
    return bytes;
}

struct KernelMetadata {
    std::string_view name;
    std::vector<std::size_t> parameters;
};

KernelMetadata read_kernel(Unpacker& unpacker) {
    KernelMetadata kernel;
    for (std::size_t fields = unpacker.map(); fields > 0; --fields) {
        const std::string_view field = unpacker.text();
        if (field == ".name") {
            kernel.name = unpacker.text();
        } else if (field == ".args") {
            for (std::size_t left = unpacker.array(); left > 0; --left) {
                if (const auto bytes = read_parameter(unpacker))
                    kernel.parameters.push_back(*bytes);
            }
        } else {
            unpacker.skip();
        }
    }
    return kernel;
}

// Kernels by handle, for the life of the process.
struct Loaded {
    std::mutex mutex;
    std::map<Kernel, std::vector<std::size_t>> parameters;
};

Loaded& loaded() {
    static Loaded& loaded = *new Loaded;
    return loaded;
}

}  // namespace

std::vector<std::size_t> parameter_sizes(std::string_view code, const std::string& entry) {
    if (!code.starts_with(kElf)) {
        throw GpuError("the code of the kernel " + entry +
                       " is no code object: it does not begin as ELF");
    }
    if (read<Elf64_Ehdr>(code, 0).e_machine != kAmdGpu) {
        throw GpuError("the code of the kernel " + entry + " is not for AMD devices");
    }
    Unpacker unpacker(metadata_of(code));
    for (std::size_t fields = unpacker.map(); fields > 0; --fields) {
        if (unpacker.text() != "amdhsa.kernels") {
            unpacker.skip();
            continue;
        }
        for (std::size_t left = unpacker.array(); left > 0; --left) {
            const KernelMetadata kernel = read_kernel(unpacker);
            if (kernel.name == entry) return kernel.parameters;
        }
    }
    throw GpuError("the code object has no kernel " + entry);
}

Kernel load_code(std::string_view code, const std::string& entry) {
    std::vector<std::size_t> sizes = parameter_sizes(code, entry);
    Module module = nullptr;
    Kernel kernel = nullptr;
    call<&Table::hipModuleLoadData>(&module, static_cast<const void*>(code.data()));
    call<&Table::hipModuleGetFunction>(&kernel, module, entry.c_str());
    const std::lock_guard lock(loaded().mutex);
    loaded().parameters[kernel] = std::move(sizes);
    return kernel;
}

std::vector<std::size_t> parameters_of(Kernel kernel) {
    const std::lock_guard lock(loaded().mutex);
    const auto found = loaded().parameters.find(kernel);
    if (found == loaded().parameters.end()) {
        throw GpuError(
            "HIP does not tell the parameters of a kernel that another library has loaded; launch "
            "it by that library");
    }
    return found->second;
}

}  // namespace ficco::hip
