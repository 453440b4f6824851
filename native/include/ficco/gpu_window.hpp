// Addresses of the windows of a group on one of its GPUs. The caller keeps the windows alive.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/limits.hpp"

namespace ficco {

class GpuWindow {
  public:
    // Addresses by rank and copy: words[rank * kWindowCopies + copy], and data likewise.
    // `writable`: by rank, whether this rank's streams may write to the words of that rank. Words
    // of other ranks are raised by copies or by kernels. Empty: all are writable.
    GpuWindow(std::vector<GpuAddress> words, std::vector<GpuAddress> data, std::size_t data_bytes,
              std::vector<bool> writable = {})
        : words_(std::move(words)),
          data_(std::move(data)),
          data_bytes_(data_bytes),
          writable_(std::move(writable)) {
        if (words_.empty() || words_.size() % kWindowCopies != 0 || words_.size() != data_.size()) {
            throw std::invalid_argument(std::to_string(words_.size()) + " addresses of words and " +
                                        std::to_string(data_.size()) +
                                        " of data; there are two of each for every rank");
        }
        if (writable_.empty()) writable_.resize(static_cast<std::size_t>(world()), true);
        if (writable_.size() != static_cast<std::size_t>(world())) {
            throw std::invalid_argument("writable has " + std::to_string(writable_.size()) +
                                        " entries, the window has " + std::to_string(world()) +
                                        " ranks");
        }
    }

    int world() const noexcept { return static_cast<int>(words_.size()) / kWindowCopies; }
    std::size_t data_bytes() const noexcept { return data_bytes_; }
    bool writable(int rank) const { return writable_[static_cast<std::size_t>(rank)]; }
    GpuAddress words(int rank, int copy) const { return words_[place(rank, copy)]; }
    GpuAddress data(int rank, int copy) const { return data_[place(rank, copy)]; }
    GpuAddress word(int rank, int copy, int index) const {
        return words(rank, copy) + 4 * static_cast<GpuAddress>(index);
    }

  private:
    static std::size_t place(int rank, int copy) {
        return static_cast<std::size_t>(rank) * kWindowCopies + static_cast<std::size_t>(copy);
    }

    std::vector<GpuAddress> words_;
    std::vector<GpuAddress> data_;
    std::size_t data_bytes_;
    std::vector<bool> writable_;
};

}  // namespace ficco
