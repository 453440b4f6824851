// Device memory and page-locked host memory, all of it host memory. Addresses are never reused, so
// that every access after a free or past an end is detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "abi.hpp"

namespace ficco::driver_double {

// How memory of a device is shared.
struct Sharing {
    bool exported = false;  // other processes can open it, by its file
    bool cached = true;     // kernels may see old bytes; see arrivals.hpp
};

struct Block {
    enum class Kind { kDevice, kHost, kRegistered, kOpened };

    Block(Kind kind, int device, Address address, std::size_t bytes, int file = -1,
          bool cached = true)
        : kind(kind), device(device), address(address), bytes(bytes), file(file), cached(cached) {}
    ~Block();  // unmaps the pages
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const Kind kind;
    const int device;
    const Address address;
    const std::size_t bytes;
    const int file;  // that other processes can open; -1 if there is none
    const bool cached;

    // Memory of a device: of this process, or opened from another one.
    bool on_device() const { return kind == Kind::kDevice || kind == Kind::kOpened; }
};

// The kind of memory that an access expects: memory of the driver (of a device, or page-locked), or
// any. The host sides of copies and the addresses of cuMemcpy may be any.
enum class Expect { kKnown, kAny };

class Memory {
  public:
    explicit Memory(int devices);

    // New memory is filled with garbage. Throws Failure if there is none left.
    Address allocate(Block::Kind kind, int device, std::size_t bytes, Sharing sharing = {});
    // Memory of a device that another process has exported.
    Address open(int device, int file, std::size_t bytes, bool cached);
    void add_registered(int device, void* address, std::size_t bytes);
    // Returns the block, which lives until no copy uses it. Throws Failure if none begins there.
    std::shared_ptr<Block> release(Block::Kind kind, Address address);
    void release_device(int device);  // all of its blocks

    std::shared_ptr<Block> find(Address address);  // null if no block is there

    // Whether these bytes are allocated. Sets the block, if known, which keeps them alive.
    bool find_bytes(Address address, std::size_t bytes, Expect expect,
                    std::shared_ptr<Block>& block);

    std::size_t available(int device);
    static std::size_t total();  // of every device

  private:
    // A range of addresses that is allocated from its beginning to its end.
    struct Range {
        Address begin;
        Address next;
        std::size_t used;
    };

    // The next addresses of a range, in which pages of a file, or new ones, are made usable.
    Address place(Range& range, std::size_t bytes, int file);
    bool in_ranges(Address address) const;
    std::shared_ptr<Block> find_locked(Address address) const;

    std::mutex mutex_;
    std::vector<Range> ranges_;  // one for every device, and that of page-locked memory
    std::map<Address, std::shared_ptr<Block>> blocks_;
};

}  // namespace ficco::driver_double
