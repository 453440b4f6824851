// Keeping bytes apart from running kernels.
#include "arrivals.hpp"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

namespace ficco::driver_double {

namespace {

thread_local std::optional<int> kernel_of;  // the device whose kernel the thread runs

}  // namespace

void copy_bytes(Address to, const std::byte* from, std::size_t bytes) {
    std::uint32_t word = 0;
    if (bytes != sizeof(word) || to % sizeof(word) != 0) {
        std::memmove(reinterpret_cast<void*>(to), from, bytes);
        return;
    }
    std::memcpy(&word, from, sizeof(word));
    std::atomic_ref(*reinterpret_cast<std::uint32_t*>(to)).store(word, std::memory_order_release);
}

Arrivals& Arrivals::get() {
    static Arrivals& arrivals = *new Arrivals;
    return arrivals;
}

void Arrivals::arrive_all(Device& device) {
    for (const Kept& kept : device.kept) {
        copy_bytes(kept.to, kept.bytes.data(), kept.bytes.size());
    }
    device.kept.clear();
}

void Arrivals::keep_apart(bool on) {
    const std::lock_guard lock(mutex_);
    on_ = on;
    for (auto& [ordinal, device] : devices_) arrive_all(device);
}

void Arrivals::write(int device, Address to, const std::byte* from, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    Device& target = devices_[device];
    if (on_ && target.kernels > 0) {
        target.kept.push_back({to, {from, from + bytes}});
    } else {
        copy_bytes(to, from, bytes);
    }
}

void Arrivals::arrive(Address begin, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto& [ordinal, device] : devices_) {
        std::erase_if(device.kept, [&](const Kept& kept) {
            const bool read = kept.to < begin + bytes && begin < kept.to + kept.bytes.size();
            if (read) copy_bytes(kept.to, kept.bytes.data(), kept.bytes.size());
            return read;
        });
    }
}

void Arrivals::begin_kernel(int device) {
    const std::lock_guard lock(mutex_);
    arrive_all(devices_[device]);
    ++devices_[device].kernels;
    kernel_of = device;
}

void Arrivals::end_kernel(int device) {
    const std::lock_guard lock(mutex_);
    if (--devices_[device].kernels == 0) arrive_all(devices_[device]);
    kernel_of.reset();
}

bool Arrivals::acquire() {
    if (!kernel_of) return false;
    const std::lock_guard lock(mutex_);
    arrive_all(devices_[*kernel_of]);
    return true;
}

}  // namespace ficco::driver_double
