// Sizes that are equal on all ranks, and the layout of signal words. ficco/plan/__init__.py
// computes the same places.
#pragma once

#include <cstdint>

namespace ficco {

inline constexpr int kMaxWorld = 64;
inline constexpr int kMaxChunks = 256;

// Native lanes of a rank: one per peer, and as many again for local work.
inline constexpr int kMaxLanes = 128;

// Per peer: `data` and `ready` for each chunk, `entered` and `free` once.
inline constexpr int kWordsPerCopy = kMaxWorld * (2 * kMaxChunks + 2);
inline constexpr int kEnteredWords = kMaxWorld * kMaxChunks;
inline constexpr int kFreeWords = kMaxWorld * (kMaxChunks + 1);
inline constexpr int kReadyWords = kMaxWorld * (kMaxChunks + 2);

// The rank that raises the word `index` of the window of `word_rank`.
constexpr int raiser_of(int word_rank, int index) noexcept {
    if (index < kEnteredWords) return index / kMaxChunks;
    if (index < kFreeWords) return index - kEnteredWords;
    if (index < kReadyWords) return index - kFreeWords;
    return word_rank;
}

inline constexpr int kWindowCopies = 2;

// Interval at which sleepers check whether the group has failed.
inline constexpr std::int64_t kLookAgainNs = 5'000'000;

}  // namespace ficco
