// Mapping by mmap. The layout of shared files is in shared.cpp.
#include "ficco/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ficco {

namespace {

void* map(std::size_t bytes, int flags, int file, std::size_t offset) {
    if (bytes == 0) return nullptr;
    void* pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(offset));
    if (pages != MAP_FAILED) return pages;
    throw OutOfMemory("a window of " + std::to_string(bytes) +
                      " bytes cannot be mapped: " + std::strerror(errno));
}

}  // namespace

Mapping::Mapping(std::size_t bytes)
    : data_(map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), bytes_(bytes) {}

Mapping::Mapping(int file, std::size_t offset, std::size_t bytes)
    : data_(map(bytes, MAP_SHARED, file, offset)), bytes_(bytes) {}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

std::size_t Mapping::page_bytes() noexcept {
    return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace ficco
