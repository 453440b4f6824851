// How AMD's devices and ROCm may behave, as a test requests it. A mode shows that ficco can live
// with a behaviour; it does not show that hardware behaves so.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "memory.hpp"
#include "work.hpp"

namespace ficco::driver_double {

class Driver;

// What becomes of a copy that asks for no compute units (hipMemcpyDeviceToDeviceNoCU).
enum class NoCu {
    kDone,       // by a copy engine
    kDropped,    // not at all, and the call succeeds
    kBlit,       // by a kernel
    kSmallBlit,  // by a kernel up to 16 KiB
};

class Modes {
  public:
    static Modes& get();  // lives until the process ends

    std::atomic<NoCu> no_cu;
    std::atomic<bool> opened_is_local;  // kernels copy to memory that handles have opened

  private:
    Modes();
};

// The work of hipMemcpyAsync with a kind.
Work copy_of_kind(Driver& driver, void* target, const void* source, std::size_t bytes, int kind);
// Work that needs a compute unit.
Work by_kernel(Work work);

}  // namespace ficco::driver_double
