// Copies of bytes, without pacing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ficco {

// Copies a box of `rows` rows of `row_bytes` bytes; a pitch is the distance between rows. The
// boxes must not overlap.
inline void copy_box(std::byte* to, std::int64_t to_pitch, const std::byte* from,
                     std::int64_t from_pitch, std::int64_t rows, std::int64_t row_bytes) noexcept {
    if (rows <= 0 || row_bytes <= 0) return;  // addresses of empty boxes may be null
    if (rows == 1 || (to_pitch == row_bytes && from_pitch == row_bytes)) {
        std::memcpy(to, from, static_cast<std::size_t>(rows * row_bytes));
        return;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + row * to_pitch, from + row * from_pitch,
                    static_cast<std::size_t>(row_bytes));
    }
}

}  // namespace ficco
