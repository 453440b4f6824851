// Memory by mmap: a range of addresses per device is reserved, and pages are made usable in order.
#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ficco::driver_double {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kRangeBytes = std::size_t{1} << 38;  // addresses, not memory
constexpr std::size_t kDeviceBytes = std::size_t{4} << 30;
constexpr int kGarbage = 0xA5;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

int new_file(std::size_t bytes) {
    const int file = memfd_create("ficco double", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole_pages(bytes))) != 0) {
        if (file >= 0) close(file);
        throw Failure{kOutOfMemory};
    }
    return file;
}

}  // namespace

Block::~Block() {
    if (kind == Kind::kRegistered) return;
    // Maps new pages without any access over the old ones.
    mmap(pointer(address), whole_pages(bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (file >= 0) close(file);
}

Memory::Memory(int devices) {
    for (int i = 0; i <= devices; ++i) {
        void* begin = mmap(nullptr, kRangeBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (begin == MAP_FAILED) throw Failure{kOutOfMemory};
        const auto address = reinterpret_cast<Address>(begin);
        ranges_.push_back({address, address, 0});
    }
}

std::size_t Memory::total() { return kDeviceBytes; }

std::size_t Memory::available(int device) {
    const std::lock_guard lock(mutex_);
    return kDeviceBytes - ranges_[static_cast<std::size_t>(device)].used;
}

Address Memory::place(Range& range, std::size_t bytes, int file) {
    // A page that nobody may touch lies between blocks.
    const std::size_t stride = whole_pages(bytes) + kPage;
    if (range.next + stride > range.begin + kRangeBytes) throw Failure{kOutOfMemory};
    constexpr int kUsable = PROT_READ | PROT_WRITE;
    const bool placed = file < 0 ? mprotect(pointer(range.next), whole_pages(bytes), kUsable) == 0
                                 : mmap(pointer(range.next), whole_pages(bytes), kUsable,
                                        MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
    if (!placed) throw Failure{kOutOfMemory};
    const Address address = range.next;
    range.next += stride;
    return address;
}

Address Memory::allocate(Block::Kind kind, int device, std::size_t bytes, Sharing sharing) {
    if (bytes == 0) throw Failure{kInvalidValue};
    std::shared_ptr<Block> block;
    {
        const std::lock_guard lock(mutex_);
        Range& range = kind == Block::Kind::kDevice ? ranges_[static_cast<std::size_t>(device)]
                                                    : ranges_.back();
        if (bytes > kDeviceBytes - std::min(range.used, kDeviceBytes)) throw Failure{kOutOfMemory};
        const int file = sharing.exported ? new_file(bytes) : -1;
        const Address address = place(range, bytes, file);
        block = std::make_shared<Block>(kind, device, address, bytes, file, sharing.cached);
        range.used += bytes;
        blocks_[block->address] = block;
    }
    std::memset(pointer(block->address), kGarbage, bytes);
    return block->address;
}

Address Memory::open(int device, int file, std::size_t bytes, bool cached) {
    const std::lock_guard lock(mutex_);
    const Address address = place(ranges_[static_cast<std::size_t>(device)], bytes, file);
    blocks_[address] =
        std::make_shared<Block>(Block::Kind::kOpened, device, address, bytes, file, cached);
    return address;
}

void Memory::add_registered(int device, void* address, std::size_t bytes) {
    const auto begin = reinterpret_cast<Address>(address);
    if (begin == 0 || bytes == 0) throw Failure{kInvalidValue};
    const std::lock_guard lock(mutex_);
    const auto next = blocks_.lower_bound(begin);
    if (find_locked(begin) || (next != blocks_.end() && next->first < begin + bytes)) {
        throw Failure{kHostMemoryRegisteredAlready};
    }
    blocks_[begin] = std::make_shared<Block>(Block::Kind::kRegistered, device, begin, bytes);
}

std::shared_ptr<Block> Memory::release(Block::Kind kind, Address address) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end() || found->second->kind != kind) throw Failure{kInvalidValue};
    std::shared_ptr<Block> block = found->second;
    blocks_.erase(found);
    if (kind == Block::Kind::kDevice) {
        ranges_[static_cast<std::size_t>(block->device)].used -= block->bytes;
    } else if (kind == Block::Kind::kHost) {
        ranges_.back().used -= block->bytes;
    }
    return block;
}

void Memory::release_device(int device) {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [&](const auto& entry) {
        return entry.second->device == device && entry.second->kind == Block::Kind::kDevice;
    });
    ranges_[static_cast<std::size_t>(device)].used = 0;
}

bool Memory::in_ranges(Address address) const {
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& range) {
        return address >= range.begin && address < range.begin + kRangeBytes;
    });
}

std::shared_ptr<Block> Memory::find_locked(Address address) const {
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return nullptr;
    const std::shared_ptr<Block>& block = std::prev(after)->second;
    return address < block->address + block->bytes ? block : nullptr;
}

std::shared_ptr<Block> Memory::find(Address address) {
    const std::lock_guard lock(mutex_);
    return find_locked(address);
}

bool Memory::find_bytes(Address address, std::size_t bytes, Expect expect,
                        std::shared_ptr<Block>& block) {
    const std::lock_guard lock(mutex_);
    block = find_locked(address);
    if (block) return bytes <= block->address + block->bytes - address;
    return expect == Expect::kAny && address != 0 && !in_ranges(address);
}

}  // namespace ficco::driver_double
