// Words that threads sleep on. What a word means, and who may change it, is said where it is used.
#pragma once

#include <atomic>
#include <cstdint>

namespace ficco {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "the kernel reads words as they are");

// Sleeps while `word` holds `seen`, until CLOCK_MONOTONIC `deadline_ns` at the latest. May return
// early for no reason, so callers look again. Works across processes that map the word.
void futex_wait(const Word& word, std::uint32_t seen, std::int64_t deadline_ns) noexcept;

// Wakes all that sleep on `word`; call it after changing the word.
void futex_wake_all(const Word& word) noexcept;

// Tells the core that this is a spinning wait.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores
#endif
}

}  // namespace ficco
