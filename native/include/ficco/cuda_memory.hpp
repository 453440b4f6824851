// Memory of the current device for windows, and access to the memory of other devices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ficco/cuda_api.hpp"

namespace ficco::cuda {

// See the calls of Gpu with these names.
Pointer new_window_memory(std::size_t bytes);
void delete_window_memory(Pointer address);
void fill_words(Pointer address, std::uint32_t value, std::size_t count);
void reach(int peer);
void synchronize();

}  // namespace ficco::cuda
