// Memory of a device for windows, which other devices and processes write to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ficco/gpu.hpp"
#include "ficco/hip_api.hpp"

namespace ficco::hip {

using ficco::WindowPart;  // data are fine-grained, words are not cached

// Memory of a device, which is zero. It waits for the device. The calls throw GpuError, and do not
// change the thread's current device.
GpuAddress new_window_memory(int device, std::size_t bytes, WindowPart part);
void delete_window_memory(int device, GpuAddress address);
// Stores a word `count` times, and waits for that.
void fill_words(int device, GpuAddress address, std::uint32_t value, std::size_t count);
// Allows a device to access another one's memory; a second call does nothing.
void reach(int device, int peer);
// Waits until a device has done all of its work.
void synchronize(int device);

// A handle by which another process of the host opens the memory; none opens its own.
IpcHandle export_memory(int device, GpuAddress address);
// The memory in this process, as `device` reaches it.
GpuAddress open_memory(int device, const IpcHandle& handle);
void close_memory(int device, GpuAddress address);

}  // namespace ficco::hip
