// The memory of a group whose ranks are processes: an unnamed file, and its layout.
//
//   control | paced links | words [rank][copy][word] | data [rank][copy][capacity]
//
// It is freed when the last process has unmapped it, however that process ended. The creator
// reserves the first two parts; each rank reserves its own words and data, which are then in memory
// near to it.
#pragma once

#include <cstddef>

#include "ficco/limits.hpp"

namespace ficco {

// Every part begins on a page. Throws std::invalid_argument, OutOfMemory.
class SharedLayout {
  public:
    SharedLayout(int world, std::size_t data_bytes);

    std::size_t capacity() const noexcept { return capacity_; }  // data_bytes, in whole pages
    std::size_t fabric() const noexcept { return fabric_; }
    std::size_t words() const noexcept { return words_; }
    std::size_t words_bytes() const noexcept { return data_ - words_; }
    std::size_t words_of(int rank) const noexcept;
    std::size_t words_of_bytes() const noexcept { return words_of_bytes_; }
    std::size_t data_of(int rank) const noexcept;
    std::size_t data_of_bytes() const noexcept { return kWindowCopies * capacity_; }
    std::size_t bytes() const noexcept { return bytes_; }

  private:
    std::size_t capacity_;
    std::size_t fabric_;
    std::size_t words_;
    std::size_t words_of_bytes_;
    std::size_t data_;
    std::size_t bytes_;
};

// A process's place in such a memory.
struct Membership {
    int memory;  // file descriptor; may be closed when it has been mapped
    int world;
    int rank;
    std::size_t data_bytes;  // of a window copy
};

// Creates the memory and returns its file descriptor, which children do not inherit. The file can
// never shrink. Throws OutOfMemory if it exceeds the available memory.
int create_memory(int world, std::size_t data_bytes);

// Throws std::invalid_argument if the file is smaller than the layout or could shrink.
void check_memory(int memory, const SharedLayout& layout);

// Reserves pages, so that later accesses cannot fail. Throws OutOfMemory.
void reserve(int memory, std::size_t offset, std::size_t bytes);

// The memory that the kernel reports as available to this process, also in a container.
std::size_t available_bytes();

}  // namespace ficco
