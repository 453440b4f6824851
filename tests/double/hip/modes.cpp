// The modes, their sources, and the functions by which tests set them. From the environment:
//
//   FICCO_DOUBLE_NOCU=dropped, blit or small_blit     FICCO_DOUBLE_STALE=1
//   FICCO_DOUBLE_OPENED=local
//   FICCO_DOUBLE_QUEUES=4 (see faults.cpp)            FICCO_DOUBLE_SYNC_LOCKS=1 (sync_locks.hpp)
//
// Sources. "clr" is AMD's runtime, github.com/ROCm/clr, and since 2025 projects/clr of
// github.com/ROCm/rocm-systems; a number is an issue or a pull request of rocm-systems.
//
// - Few hardware queues: Device::acquireQueue (clr, rocclr/device/rocm/rocdevice.cpp) makes
//   GPU_MAX_HW_QUEUES queues per priority, 4 by default, and then shares the one with the fewest
//   streams. #9249 is a deadlock of a producer behind its consumer. The double gives queues in
//   turn, and lets copies wait in them, too, which is more than the hardware does.
// - Copies by blit kernels: KernelBlitManager::copyBuffer (clr, rocclr/device/rocm/rocblit.cpp)
//   copies within a device, and to peers up to ROC_P2P_SDMA_SIZE (1 MiB), by a kernel, unless SDMA
//   is asked for. #683: a copy without compute units was a kernel up to 16 KiB. #9100: one to a
//   peer could be a kernel of any size.
// - Memory that is opened by handles and taken for local, so that kernels copy: #4784 and #9472.
// - Fills are kernels: KernelBlitManager::fillBuffer (same file).
// - Dropped copies: #11318, a report of copies without compute units that wrote nothing.
// - Bytes that a running kernel does not see (arrivals.hpp): #9559, an acquire that left L2 as it
//   was let kernels read old bytes; ROCm/rccl#1932, missing fences on cached memory made MI350
//   hang.
#include "modes.hpp"

#include <cstdlib>
#include <string_view>

#include "arrivals.hpp"
#include "hip_call.hpp"
#include "multiprocessors.hpp"

namespace ficco::driver_double {

namespace {

constexpr int kDefaultKind = 4;
constexpr int kNoCuKind = 1024;
constexpr std::size_t kSmall = 16U << 10;
constexpr std::size_t kMostPeerBlit = 1U << 20;

std::string_view environment(const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? "" : text;
}

NoCu no_cu_of(std::string_view text) {
    if (text == "dropped") return NoCu::kDropped;
    if (text == "blit") return NoCu::kBlit;
    if (text == "small_blit") return NoCu::kSmallBlit;
    return NoCu::kDone;
}

bool is_opened(Driver& driver, Address address) {
    const auto block = driver.memory.find(address);
    return block && block->kind == Block::Kind::kOpened;
}

Engine engine_of(Driver& driver, Address target, Address source, std::size_t bytes, int kind) {
    if (kind == kNoCuKind) {
        const NoCu mode = Modes::get().no_cu;
        const bool small = mode == NoCu::kSmallBlit && bytes <= kSmall;
        const bool local = Modes::get().opened_is_local &&
                           (is_opened(driver, target) || is_opened(driver, source));
        const bool blit = mode == NoCu::kBlit || small || local;
        return blit ? Engine::kKernel : Engine::kCopyEngine;
    }
    if (bytes <= kSmall) return Engine::kKernel;
    const auto to = driver.memory.find(target);
    const auto from = driver.memory.find(source);
    if (!to || !from || !to->on_device() || !from->on_device()) return Engine::kCopyEngine;
    const bool peers = to->device != from->device;
    return peers && bytes > kMostPeerBlit ? Engine::kCopyEngine : Engine::kKernel;
}

}  // namespace

Modes& Modes::get() {
    static Modes& modes = *new Modes;
    return modes;
}

Modes::Modes()
    : no_cu(no_cu_of(environment("FICCO_DOUBLE_NOCU"))),
      opened_is_local(environment("FICCO_DOUBLE_OPENED") == "local") {
    if (environment("FICCO_DOUBLE_STALE") == "1") Arrivals::get().keep_apart(true);
}

Work copy_of_kind(Driver& driver, void* target, const void* source, std::size_t bytes, int kind) {
    if (target == nullptr || source == nullptr) throw Failure{kInvalidValue};
    if (kind < 0 || (kind > kDefaultKind && kind != kNoCuKind)) {
        throw Failure{kInvalidCopyDirection};
    }
    const auto to = reinterpret_cast<Address>(target);
    const auto from = reinterpret_cast<Address>(source);
    const bool to_known = kind == 1 || kind == 3 || kind == kNoCuKind;
    const bool from_known = kind == 2 || kind == 3 || kind == kNoCuKind;
    Work work = copy({to, to_known ? Expect::kKnown : Expect::kAny},
                     {from, from_known ? Expect::kKnown : Expect::kAny}, bytes,
                     kind == kNoCuKind ? Route::kPeerAccess : Route::kHost,
                     engine_of(driver, to, from, bytes, kind));
    if (kind == kNoCuKind && Modes::get().no_cu == NoCu::kDropped) work.body = [](Context&) {};
    return work;
}

Work by_kernel(Work work) {
    if (!work.body) return work;
    work.body = [body = std::move(work.body)](Context& context) {
        Multiprocessors::get().wait(context.device, context);
        body(context);
    };
    return work;
}

}  // namespace ficco::driver_double

using ficco::driver_double::Arrivals;
using ficco::driver_double::Modes;

// "dropped", "blit" or "small_blit"; "" ends this. It holds for copies enqueued from now on.
DOUBLE_API void ficcoDoubleNoCu(const char* mode) {
    Modes::get().no_cu = ficco::driver_double::no_cu_of(mode);
}

// Whether running kernels see bytes that arrive only after an acquire.
DOUBLE_API void ficcoDoubleStale(int on) { Arrivals::get().keep_apart(on != 0); }

// A system-scope acquire, by a kernel on its own thread.
DOUBLE_API int ficcoDoubleAcquire() {
    return Arrivals::get().acquire() ? ficco::driver_double::kSuccess
                                     : ficco::driver_double::kIllegalState;
}
