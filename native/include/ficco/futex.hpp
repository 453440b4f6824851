// Words that threads sleep on. The users of a word define its meaning and its writers.
#pragma once

#include <atomic>
#include <cstdint>

namespace ficco {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "the kernel reads words as they are");

// Sleeps while `word` holds `seen`, until CLOCK_MONOTONIC `deadline_ns` at the latest. Wakes may be
// spurious, so callers must check again. Works across processes that map the word.
void futex_wait(const Word& word, std::uint32_t seen, std::int64_t deadline_ns) noexcept;

// Wakes all threads that sleep on `word`; call it after a change of the word.
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
