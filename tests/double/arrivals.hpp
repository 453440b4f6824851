// Bytes that have arrived in a device's memory, and that a running kernel does not see yet.
//
// A device of AMD has several L2 caches. A kernel that runs while a copy engine, or a peer, writes
// to the device's memory can read old bytes until it acquires. The model: while kernels run on a
// device, such bytes are kept apart. They arrive when a kernel of the device acquires
// (ficcoDoubleAcquire), when one begins (a launch acquires), and when the last one ends. Memory
// that is not cached gets its bytes at once. Writers in other processes are not part of the model.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "abi.hpp"

namespace ficco::driver_double {

// Copies bytes. A word arrives whole, and after what the thread has copied before.
void copy_bytes(Address to, const std::byte* from, std::size_t bytes);

class Arrivals {
  public:
    static Arrivals& get();  // lives until the process ends

    void keep_apart(bool on);  // what is kept arrives when this ends

    // Writes bytes to a device's memory, or keeps them apart.
    void write(int device, Address to, const std::byte* from, std::size_t bytes);
    // Makes bytes arrive that a copy or the host is about to read.
    void arrive(Address begin, std::size_t bytes);

    void begin_kernel(int device);
    void end_kernel(int device);
    bool acquire();  // by a kernel, on its thread; false where none runs

  private:
    struct Kept {
        Address to;
        std::vector<std::byte> bytes;
    };
    struct Device {
        int kernels = 0;
        std::vector<Kept> kept;  // in order
    };

    static void arrive_all(Device& device);

    std::mutex mutex_;
    bool on_ = false;
    std::map<int, Device> devices_;
};

// A kernel's run on a device.
class KernelRun {
  public:
    explicit KernelRun(int device) : device_(device) { Arrivals::get().begin_kernel(device_); }
    ~KernelRun() { Arrivals::get().end_kernel(device_); }
    KernelRun(const KernelRun&) = delete;
    KernelRun& operator=(const KernelRun&) = delete;

  private:
    const int device_;
};

}  // namespace ficco::driver_double
