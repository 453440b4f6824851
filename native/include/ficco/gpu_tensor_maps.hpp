// A cache of tensor maps by their boxes, so that a call with the addresses of an earlier call
// encodes none.
#pragma once

#include <cstddef>
#include <unordered_map>

#include "ficco/gpu.hpp"

namespace ficco {

class GpuTensorMaps {
  public:
    // Valid until the next call.
    const TensorMap& find(Gpu& gpu, const TensorBox& box) {
        const auto entry = maps_.find(box);
        if (entry != maps_.end()) return entry->second;
        if (maps_.size() == kMost) maps_.clear();
        return maps_.emplace(box, gpu.encode(box)).first->second;
    }

  private:
    // Enough for the matrices of a training step's layers that share a plan.
    static constexpr std::size_t kMost = 1024;

    // The plan fixes the other members of a box.
    struct Hash {
        std::size_t operator()(const TensorBox& box) const noexcept {
            const auto pitch = static_cast<GpuAddress>(box.pitch);
            const auto rows = static_cast<GpuAddress>(box.rows);
            return (box.address ^ pitch << 40 ^ rows << 48) * 0x9E3779B97F4A7C15U >> 8;
        }
    };

    std::unordered_map<TensorBox, TensorMap, Hash> maps_;
};

}  // namespace ficco
