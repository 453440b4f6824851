// Reading a cubin: an ELF file, in which a section ".nv.info.NAME" says of a kernel's parameters.
#include "cubin.hpp"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <string_view>

namespace ficco::driver_double {

namespace {

constexpr std::string_view kInfo = ".nv.info.";
constexpr std::uint8_t kSized = 4;       // format of an entry whose data follow it
constexpr std::uint8_t kParameter = 23;  // EIATTR_KPARAM_INFO
constexpr Elf64_Half kCuda = 190;        // EM_CUDA

// An entry of a section; of some formats `bytes` is a value.
struct Entry {
    std::uint8_t format, kind;
    std::uint16_t bytes;
};

struct ParameterInfo {
    std::uint32_t index;
    std::uint16_t ordinal, offset;
    std::uint32_t rest;  // its upper 14 bits are the size in bytes
};

template <class Value>
Value read(const char* at) {
    Value value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

std::vector<Kernel::Parameter> parameters_of(const char* begin, const char* end) {
    std::map<std::uint16_t, Kernel::Parameter> found;
    while (begin < end) {
        const auto entry = read<Entry>(begin);
        begin += sizeof(Entry);
        if (entry.format != kSized) continue;
        if (entry.kind == kParameter) {
            const auto info = read<ParameterInfo>(begin);
            found[info.ordinal] = {info.offset, info.rest >> 18};
        }
        begin += entry.bytes;
    }
    std::vector<Kernel::Parameter> parameters;
    for (const auto& [ordinal, parameter] : found) parameters.push_back(parameter);
    return parameters;
}

}  // namespace

bool is_cubin(const void* image) { return std::memcmp(image, ELFMAG, SELFMAG) == 0; }

Cubin read_cubin(const void* image) {
    const auto* bytes = static_cast<const char*>(image);
    const auto header = read<Elf64_Ehdr>(bytes);
    if (header.e_machine != kCuda || header.e_shentsize != sizeof(Elf64_Shdr)) {
        throw Failure{kInvalidPtx};
    }
    const auto section = [&](std::size_t i) {
        return read<Elf64_Shdr>(bytes + header.e_shoff + i * sizeof(Elf64_Shdr));
    };
    const char* names = bytes + section(header.e_shstrndx).sh_offset;
    Cubin found;
    for (std::size_t i = 0; i < header.e_shnum; ++i) {
        const Elf64_Shdr each = section(i);
        const std::string_view name = names + each.sh_name;
        if (!name.starts_with(kInfo)) continue;
        const char* begin = bytes + each.sh_offset;
        found[std::string(name.substr(kInfo.size()))] = parameters_of(begin, begin + each.sh_size);
    }
    return found;
}

}  // namespace ficco::driver_double
