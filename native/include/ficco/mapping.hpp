// Mapped pages of memory: anonymous pages, initially zero, and pages of a file.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace ficco {

// Reports the requested size (std::bad_alloc has no message).
class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
    const char* what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

class Mapping {
  public:
    Mapping() = default;
    explicit Mapping(std::size_t bytes);                       // throws OutOfMemory
    Mapping(int file, std::size_t offset, std::size_t bytes);  // shared; the offset is page-aligned
    ~Mapping();
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }

    std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
    std::size_t bytes() const noexcept { return bytes_; }

    static std::size_t page_bytes() noexcept;

  private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace ficco
