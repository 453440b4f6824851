// Reads of a GPU's memory that do not block the caller for long.
//
// While some thread of the process loads a kernel after a wait, the driver blocks every copy call,
// in all contexts, until that wait ends. So each read has a separate detached thread: the caller,
// who may have to end the wait, abandons the read and continues. The thread owns all that it uses,
// so it may end after all others, or stay blocked until the process ends.
#pragma once

#include <cstddef>
#include <memory>

#include "ficco/futex.hpp"
#include "ficco/gpu.hpp"
#include "ficco/gpu_side_channel.hpp"

namespace ficco {

// Only one thread at a time may call it.
class GpuReader {
  public:
    // Reads `bytes` at a time.
    GpuReader(std::shared_ptr<Gpu> gpu, std::size_t bytes);

    // The data at an address, valid until the next call. Null if they do not arrive in time, `stop`
    // is no longer 0, an earlier read is blocked, or no thread can be started. Throws GpuError if a
    // driver call fails.
    const void* read(std::shared_ptr<const GpuWay> way, GpuAddress address, double within_s,
                     const Word& stop);

    // Whether an abandoned read is still blocked, and uses the memory that it reads.
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
