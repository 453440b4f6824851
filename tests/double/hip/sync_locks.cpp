// The locks of streams, and the function by which tests request them.
#include "sync_locks.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "hip_call.hpp"

namespace ficco::driver_double {

SyncLocks& SyncLocks::get() {
    static SyncLocks& locks = *new SyncLocks;
    return locks;
}

SyncLocks::SyncLocks() {
    const char* text = std::getenv("FICCO_DOUBLE_SYNC_LOCKS");
    on = text != nullptr && std::string_view(text) == "1";
}

bool SyncLocks::free(StreamHandle stream) const {
    const auto [begin, end] = waiting_.equal_range(stream);
    return std::all_of(begin, end, [](const auto& waiting) {
        return waiting.second == std::this_thread::get_id();
    });
}

void SyncLocks::pass(StreamHandle stream) {
    if (!on) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free(stream); });
}

SyncLocks::Held::Held(StreamHandle stream) : stream_(stream) {
    SyncLocks& locks = get();
    const std::lock_guard lock(locks.mutex_);
    locks.waiting_.emplace(stream, std::this_thread::get_id());
}

SyncLocks::Held::~Held() {
    SyncLocks& locks = get();
    const std::lock_guard lock(locks.mutex_);
    const auto [begin, end] = locks.waiting_.equal_range(stream_);
    locks.waiting_.erase(std::find_if(begin, end, [](const auto& waiting) {
        return waiting.second == std::this_thread::get_id();
    }));
    locks.changed_.notify_all();
}

}  // namespace ficco::driver_double

// Whether calls on a stream wait for the hipStreamSynchronize of other threads on it.
DOUBLE_API void ficcoDoubleSyncLocks(int on) {
    ficco::driver_double::SyncLocks::get().on = on != 0;
}
