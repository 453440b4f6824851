// Anonymous memory by mmap. Named shared memory will stand beside it, not in it.
#include "ficco/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ficco {

Mapping::Mapping(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        throw OutOfMemory("a window of " + std::to_string(bytes) +
                          " bytes cannot be mapped: " + std::strerror(errno));
    }
    data_ = pages;
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

std::size_t Mapping::page_bytes() noexcept {
    return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace ficco
