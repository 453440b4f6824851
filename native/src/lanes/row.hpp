// Reads one row of a table of numbers that Python passes, with errors that name the field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace ficco {

// Bytes, rows and nanoseconds beyond this are mistakes; sums and products of two are checked.
inline constexpr std::int64_t kMost = std::int64_t{1} << 56;

// Reads the fields of one row; errors name the wrong field.
class Row {
  public:
    Row(const char* table, std::size_t number, std::span<const std::int64_t> fields)
        : table_(table), number_(number), fields_(fields) {}

    std::int64_t in(std::size_t field, std::int64_t least, std::int64_t most,
                    const char* name) const {
        const std::int64_t value = fields_[field];
        if (value >= least && value <= most) return value;
        refuse(field, std::string("(") + name + ") is " + std::to_string(value) + ", not " +
                          std::to_string(least) + " to " + std::to_string(most));
    }

    [[noreturn]] void refuse(std::size_t field, const std::string& why) const {
        throw std::invalid_argument(std::string(table_) + "[" + std::to_string(number_) +
                                    "]: field " + std::to_string(field) + " " + why);
    }

    int index(std::size_t field, std::int64_t count, const char* name) const {
        return static_cast<int>(in(field, 0, count - 1, name));
    }

    std::int64_t size(std::size_t field, const char* name) const {
        return in(field, 0, kMost, name);
    }

    bool flag(std::size_t field, const char* name) const { return in(field, 0, 1, name) != 0; }

  private:
    const char* table_;
    std::size_t number_;
    std::span<const std::int64_t> fields_;
};

}  // namespace ficco
