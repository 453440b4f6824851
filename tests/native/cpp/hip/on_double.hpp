// What the tests of HIP need of the library's double.
#pragma once

#include <dlfcn.h>
#include <elf.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ficco/hip.hpp"
#include "ficco/hip_device.hpp"
#include "ficco/hip_memory.hpp"

namespace ficco::hip::test {

// A function of the double, by its type.
template <class Function>
Function* symbol(const char* name) {
    static void* const library = dlopen(hip::library().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    auto* found = reinterpret_cast<Function*>(dlsym(library, name));
    if (found == nullptr) ficco::test::give_up(__FILE__, __LINE__, std::string("no ") + name);
    return found;
}

inline void fail_call(const char* function, int status, int skip = 0) {
    symbol<void(const char*, int, int)>("ficcoDoubleFailCall")(function, skip, status);
}
inline void no_cu(const char* mode) { symbol<void(const char*)>("ficcoDoubleNoCu")(mode); }
inline unsigned long long count(const char* kind) {
    return symbol<unsigned long long(const char*)>("ficcoDoubleCounts")(kind);
}

using HostKernel = void (*)(void** parameters, const unsigned* shape);
inline GpuKernel new_kernel(std::vector<std::size_t> bytes, HostKernel run) {
    bytes.reserve(1);  // the double wants an address
    return symbol<void*(const std::size_t*, int, HostKernel)>("ficcoDoubleKernel")(
        bytes.data(), static_cast<int>(bytes.size()), run);
}

// The code of the kernel that waits for words, as the package has it for the double's devices.
inline AwaitCode await_code() {
    std::ifstream file(FICCO_PACKS "/ficco_await_words_gfx942.hsaco", std::ios::binary);
    const std::string code{std::istreambuf_iterator<char>(file), {}};
    if (code.empty()) ficco::test::give_up(__FILE__, __LINE__, "no code object in " FICCO_PACKS);
    return {code, 128};
}

// The parameters of a kernel that has none.
inline void* no_parameters[1] = {nullptr};

// Waits until something is so; false: it is not after some seconds.
template <class Condition>
bool comes_within(double seconds, const Condition& is_so) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!is_so()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
}
inline bool idle_within(Gpu& gpu, GpuStream stream, double seconds) {
    return comes_within(seconds, [&] { return gpu.idle(stream); });
}
inline void drain(Gpu& gpu, GpuStream stream) { CHECK(idle_within(gpu, stream, 10)); }

inline BoxCopy rows(GpuAddress to, GpuAddress from, std::int64_t bytes, std::int64_t count = 1) {
    return {to, bytes, from, bytes, count, bytes};
}

// Device 0 and a stream of it; devices 0 and 1 reach each other. Device 0 is current.
struct Bench {
    Bench() {
        for (const int device : {1, 0}) {
            call<&Table::hipSetDevice>(device);
            symbol<int(int, unsigned)>("hipDeviceEnablePeerAccess")(1 - device, 0);
        }
        stream = gpu->new_stream(false);
    }
    ~Bench() { gpu->delete_stream(stream); }

    std::uint32_t read(GpuAddress word) {
        std::uint32_t value = 0;
        gpu->read(&value, word, sizeof(value), stream);
        drain(*gpu, stream);
        return value;
    }

    const std::shared_ptr<Gpu> gpu = open_gpu(0);
    GpuStream stream = nullptr;
};

// A text of MessagePack.
inline std::string packed(const std::string& text) {
    return static_cast<char>(0xa0 + text.size()) + text;
}
// The metadata of a kernel with one parameter of 8 bytes, and one that HIP fills in.
inline std::string metadata_of(const std::string& kernel) {
    const auto parameter = [](const std::string& kind) {
        return "\x82" + packed(".size") + "\x08" + packed(".value_kind") + packed(kind);
    };
    return "\x82" + packed("amdhsa.version") + "\x92\x01\x02" + packed("amdhsa.kernels") +
           "\x91\x82" + packed(".args") + "\x92" + parameter("global_buffer") +
           parameter("hidden_none") + packed(".name") + packed(kernel);
}

// A code object with one kernel, which has no code.
inline std::string code_object(const std::string& kernel, Elf64_Half machine = 224) {
    const std::string names = std::string(1, '\0') + kernel + ".kd" + '\0';
    const std::string metadata = metadata_of(kernel);
    const Elf64_Nhdr note{7, static_cast<Elf64_Word>(metadata.size()), 32};
    std::string notes(reinterpret_cast<const char*>(&note), sizeof(note));
    notes += std::string("AMDGPU\0\0", 8) + metadata;
    std::array<Elf64_Sym, 2> symbols{};
    symbols[1].st_name = 1;
    const std::string table(reinterpret_cast<const char*>(symbols.data()), sizeof(symbols));

    std::array<Elf64_Shdr, 4> sections{};
    Elf64_Ehdr header{};
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_machine = machine;
    header.e_shentsize = sizeof(Elf64_Shdr);
    header.e_shnum = sections.size();
    header.e_shoff = sizeof(header);
    std::string content;
    const auto add = [&](std::size_t index, Elf64_Word type, const std::string& bytes) {
        sections[index].sh_type = type;
        sections[index].sh_offset = sizeof(header) + sizeof(sections) + content.size();
        sections[index].sh_size = bytes.size();
        content += bytes;
    };
    add(1, SHT_SYMTAB, table);
    sections[1].sh_link = 2;
    add(2, SHT_STRTAB, names);
    add(3, SHT_NOTE, notes);
    return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) +
           std::string(reinterpret_cast<const char*>(sections.data()), sizeof(sections)) + content;
}

}  // namespace ficco::hip::test
