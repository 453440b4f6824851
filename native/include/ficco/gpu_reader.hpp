// Reading a GPU's memory by whoever must not stand still for it.
//
// While some thread of the process loads a kernel behind a wait, the driver keeps every call that
// copies from returning, in all contexts, until that wait ends. So each read has a thread of its
// own, which nobody joins: whoever is to end the wait gives the read up and goes on. The thread
// holds what it uses, and so may end after everybody else, or stand until the process ends.
#pragma once

#include <cstddef>
#include <memory>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"
#include "ficco/gpu_side_channel.hpp"

namespace ficco {

// One thread at a time may call it.
class GpuReader {
  public:
    // Reads `bytes` at a time.
    GpuReader(std::shared_ptr<Gpu> gpu, std::size_t bytes);

    // What lies at an address, until the next call. Null where it does not come in time, `stop`
    // ceases to be 0, an earlier read stands, or no thread can be had. Throws GpuError where the
    // driver refuses.
    const void* read(std::shared_ptr<const GpuWay> way, GpuAddress address, double within_s,
                     const Word& stop);

    // Whether a read that was given up is under way, and uses the memory that it reads.
    bool stands() const noexcept;

  private:
    class Page;
    class Stream;
    struct Read;

    static void run(Read& read) noexcept;

    const std::shared_ptr<Page> page_;
    std::shared_ptr<Read> last_;
};

}  // namespace ficco
