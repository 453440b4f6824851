// Unnamed shared memory by memfd_create. control.cpp and fabric.cpp initialize its contents.
#include "ficco/shared.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "ficco/control.hpp"
#include "ficco/fabric.hpp"
#include "ficco/futex.hpp"
#include "ficco/mapping.hpp"

namespace ficco {

namespace {

// More than any memory, but far from overflow when rounded up and multiplied.
constexpr std::size_t kMostMemoryBytes = std::size_t{1} << 48;

// Memory is reserved in pieces, because the kernel restarts a piece when a signal arrives.
constexpr std::size_t kPieceBytes = std::size_t{64} << 20;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::size_t whole_pages(std::size_t bytes) {
    const std::size_t page = Mapping::page_bytes();
    return (bytes + page - 1) / page * page;
}

OutOfMemory out_of_memory(std::size_t bytes, const std::string& why) {
    return OutOfMemory("shared memory of " + std::to_string(bytes) +
                       " bytes cannot be had: " + why);
}

class File {
  public:
    explicit File(int number) : number_(number) {}
    ~File() {
        if (number_ >= 0) close(number_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int number() const noexcept { return number_; }
    int release() noexcept { return std::exchange(number_, -1); }

  private:
    int number_;
};

struct CloseFile {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};
using TextFile = std::unique_ptr<std::FILE, CloseFile>;

// The number after a key in a file such as /proc/meminfo, or the only number of a file ("").
// Returns unlimited if there is none. It uses C files: C++ streams have failed in processes that
// had loaded another C++ library before.
std::size_t number_in(const std::string& path, const std::string& key) {
    const TextFile file(std::fopen(path.c_str(), "re"));
    std::array<char, 256> line{};
    while (file && std::fgets(line.data(), line.size(), file.get()) != nullptr) {
        if (!std::string_view(line.data()).starts_with(key)) continue;
        std::size_t number = 0;
        if (std::sscanf(line.data() + key.size(), " %zu", &number) == 1) return number;
    }
    return std::numeric_limits<std::size_t>::max();
}

// The files of a version of control groups.
struct CgroupFiles {
    const char* root;
    const char* most;
    const char* used;
    std::array<const char*, 2> cached;  // keys of memory.stat
};
constexpr CgroupFiles kVersion2{
    "/sys/fs/cgroup", "/memory.max", "/memory.current", {"inactive_file", "active_file"}};
constexpr CgroupFiles kVersion1{"/sys/fs/cgroup/memory",
                                "/memory.limit_in_bytes",
                                "/memory.usage_in_bytes",
                                {"total_inactive_file", "total_active_file"}};

// The rest below the limit of a control group. Memory of cached files counts as free.
std::size_t left_in_cgroup(const std::string& folder, const CgroupFiles& files) {
    constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
    const std::size_t most = number_in(folder + files.most, "");
    const std::size_t used = number_in(folder + files.used, "");
    if (most == unlimited || used == unlimited) return unlimited;
    std::size_t cached = 0;
    for (const char* kind : files.cached) {
        const std::size_t bytes = number_in(folder + "/memory.stat", kind);
        if (bytes != unlimited) cached += bytes;
    }
    const std::size_t held = used - std::min(used, cached);
    return most - std::min(most, held);
}

}  // namespace

SharedLayout::SharedLayout(int world, std::size_t data_bytes) {
    if (world < 1 || world > kMaxWorld) {
        throw std::invalid_argument("world is " + std::to_string(world) + ", not 1 to " +
                                    std::to_string(kMaxWorld));
    }
    if (data_bytes > kMostMemoryBytes) {
        throw out_of_memory(data_bytes, "no machine has as much for each copy of a window");
    }
    const auto ranks = static_cast<std::size_t>(world);
    capacity_ = whole_pages(data_bytes);
    fabric_ = whole_pages(sizeof(Control));
    words_ = fabric_ + whole_pages(Fabric::state_bytes());
    words_of_bytes_ = std::size_t{kWindowCopies} * kWordsPerCopy * sizeof(Word);
    data_ = words_ + whole_pages(ranks * words_of_bytes_);
    bytes_ = data_ + ranks * data_of_bytes();
}

std::size_t SharedLayout::words_of(int rank) const noexcept {
    return words_ + static_cast<std::size_t>(rank) * words_of_bytes_;
}

std::size_t SharedLayout::data_of(int rank) const noexcept {
    return data_ + static_cast<std::size_t>(rank) * data_of_bytes();
}

int create_memory(int world, std::size_t data_bytes) {
    const SharedLayout layout(world, data_bytes);
    const std::size_t available = available_bytes();
    if (layout.bytes() > available) {
        // The kernel itself would kill a process later.
        throw out_of_memory(layout.bytes(),
                            "windows of " + std::to_string(layout.capacity()) +
                                " bytes a copy for " + std::to_string(world) +
                                " ranks need as much, and " + std::to_string(available) +
                                " are available; smaller shapes or fewer ranks need less");
    }
    File file(memfd_create("ficco", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.number() < 0 || ftruncate(file.number(), static_cast<off_t>(layout.bytes())) != 0 ||
        fcntl(file.number(), F_ADD_SEALS, kSeals) != 0) {
        throw out_of_memory(layout.bytes(), std::strerror(errno));
    }
    reserve(file.number(), 0, layout.words());
    const Mapping head(file.number(), 0, layout.words());
    Fabric::init_state(head.data() + layout.fabric());
    (new (head.data()) Control)->init(world, layout.capacity());
    return file.release();
}

void check_memory(int memory, const SharedLayout& layout) {
    struct stat status{};
    if (fstat(memory, &status) != 0) {
        throw std::invalid_argument(std::string("the memory's file cannot be looked at: ") +
                                    std::strerror(errno));
    }
    if (std::cmp_less(status.st_size, layout.bytes()) ||
        (fcntl(memory, F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
        throw std::invalid_argument("the file of " + std::to_string(status.st_size) +
                                    " bytes is not the group's memory, which has " +
                                    std::to_string(layout.bytes()) + " and cannot shrink");
    }
}

void reserve(int memory, std::size_t offset, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t piece = std::min(bytes - done, kPieceBytes);
        if (fallocate(memory, 0, static_cast<off_t>(offset + done), static_cast<off_t>(piece)) ==
            0) {
            done += piece;
        } else if (errno != EINTR) {
            throw out_of_memory(bytes, std::strerror(errno));
        }
    }
}

std::size_t available_bytes() {
    std::size_t available = std::numeric_limits<std::size_t>::max();
    const std::size_t kib = number_in("/proc/meminfo", "MemAvailable:");
    if (kib < available / 1024) available = kib * 1024;
    // "0::/path" in version 2, "9:memory:/path" in version 1; in a container the path is mostly
    // "/".
    const TextFile file(std::fopen("/proc/self/cgroup", "re"));
    std::array<char, 4096> line{};
    while (file && std::fgets(line.data(), line.size(), file.get()) != nullptr) {
        const std::string entry(line.data());
        const bool second = entry.starts_with("0::/");
        if (!second && entry.find(":memory:/") == std::string::npos) continue;
        const CgroupFiles& files = second ? kVersion2 : kVersion1;
        const std::string root = files.root;
        const std::size_t path = entry.find('/');
        std::string folder = root + entry.substr(path, entry.find('\n') - path);
        while (folder.size() >= root.size()) {
            available = std::min(available, left_in_cgroup(folder, files));
            folder.resize(folder.find_last_of('/'));
        }
    }
    return available;
}

}  // namespace ficco
