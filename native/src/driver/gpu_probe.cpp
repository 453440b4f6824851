// Sends rounds of data and signals, and polls for those of peers.
#include "ficco/gpu_probe.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/clock.hpp"
#include "ficco/gpu_commands.hpp"
#include "ficco/limits.hpp"

namespace ficco {

namespace {

// Selects the way to raise a word, as programs do (ficco/program/passes/signals.py). `writable`:
// whether the stream may write to the word: one of its own device, or one at a peer if the driver
// allows that. `behind_kernels`: whether the stream is the caller's, whose commands follow kernels;
// on other streams, a storing kernel would need room beside a kernel that waits for the word.
// `stores`: whether the device has a kernel that stores.
constexpr Raising way_to_raise(bool writable, bool behind_kernels, bool stores) {
    if (writable) return Raising::write;
    return behind_kernels && stores ? Raising::store : Raising::copy;
}

constexpr std::size_t kMostSlotBytes = std::size_t{1} << 16;
constexpr std::size_t kLeastSlotBytes = 16;
constexpr std::int64_t kProbeLookNs = 50'000;
constexpr std::int64_t kAnswersWithinNs = 2'000'000'000;

// Words of a round: the first is raised after data, the next as after a kernel.
constexpr std::size_t kBehindData = 0;
constexpr std::size_t kBehindKernel = 1;
constexpr std::size_t kProbeWords = 2;

unsigned char pattern(int sender, std::size_t round, std::uint32_t value) {
    return static_cast<unsigned char>(value ^ static_cast<std::uint32_t>(sender * 2) ^
                                      static_cast<std::uint32_t>(round));
}

}  // namespace

GpuProbe::GpuProbe(std::shared_ptr<Gpu> gpu, std::shared_ptr<const GpuWindow> window, int rank)
    : gpu_(std::move(gpu)), window_(std::move(window)), rank_(rank) {
    const auto world = static_cast<std::size_t>(window_->world());
    const std::size_t slots = world * kRounds;
    slot_bytes_ = std::min(kMostSlotBytes, window_->data_bytes() / slots / 16 * 16);
    if (slot_bytes_ < kLeastSlotBytes) {
        throw std::invalid_argument("a probe of " + std::to_string(world) + " ranks needs " +
                                    std::to_string(kLeastSlotBytes * slots) +
                                    " bytes of a window copy, which has " +
                                    std::to_string(window_->data_bytes()));
    }
    const Gpu::Current current(*gpu_);
    page_ = gpu_->new_host_page(slot_bytes_);
    stream_ = gpu_->new_stream(false);
}

GpuProbe::~GpuProbe() {
    try {
        const Gpu::Current current(*gpu_);
        drain();  // the windows may be freed next
        gpu_->delete_stream(stream_);
        gpu_->delete_host_page(page_);
    } catch (const GpuError&) {
        // the device is lost or does not finish: the page stays allocated for its read
    }
}

GpuAddress GpuProbe::slot(int owner, int sender, std::size_t round) const {
    const auto number = static_cast<GpuAddress>(sender) * kRounds + round;
    return window_->data(owner, 0) + number * slot_bytes_;
}

GpuAddress GpuProbe::words(int owner, int sender, std::size_t round) const {
    return window_->word(owner, 0, sender * kMaxChunks + static_cast<int>(round * kProbeWords));
}

void GpuProbe::send(std::uint32_t value) {
    const Gpu::Current current(*gpu_);
    gpu_->constant(value);  // writes the constant before the capture begins
    try {
        enqueue(0, value);
        gpu_->launch_captured(stream_, [&] { enqueue(1, value); });
    } catch (const GpuError&) {
        try {
            drain();  // sent data must not arrive during another probe
        } catch (const GpuError&) {
            // the first error is more informative
        }
        throw;
    }
}

void GpuProbe::enqueue(std::size_t round, std::uint32_t value) {
    const int world = window_->world();
    const auto bytes = static_cast<std::int64_t>(slot_bytes_);
    const GpuAddress own = slot(rank_, rank_, round);
    gpu_->fill(own, pattern(rank_, round, value), slot_bytes_, stream_);
    for (int turn = 1; turn < world; ++turn) {
        const int peer = (rank_ + turn) % world;
        const GpuAddress word = words(peer, rank_, round);
        gpu_->copy({slot(peer, rank_, round), bytes, own, bytes, 1, bytes}, stream_);
        raise(word + sizeof(value) * kBehindData, peer, value, false);
        raise(word + sizeof(value) * kBehindKernel, peer, value, true);
    }
}

// Raises a word as a program does.
void GpuProbe::raise(GpuAddress word, int peer, std::uint32_t value, bool behind_kernels) {
    const std::array write{WordCommand{WordCommand::Kind::write, word, value}};
    switch (way_to_raise(window_->writable(peer), behind_kernels, gpu_->no_store().empty())) {
        case Raising::write:
            gpu_->words(write, stream_);
            return;
        case Raising::store:
            gpu_->store(write, stream_);
            return;
        case Raising::copy: {
            constexpr auto kBytes = sizeof(value);
            gpu_->copy({word, kBytes, gpu_->constant(value), kBytes, 1, kBytes}, stream_);
            return;
        }
    }
}

std::vector<GpuProbe::Rounds> GpuProbe::look(std::uint32_t value, double seconds) {
    const Gpu::Current current(*gpu_);
    const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
    std::vector<Rounds> found(static_cast<std::size_t>(window_->world()));
    for (int sender = 0; sender < window_->world(); ++sender) {
        for (std::size_t round = 0; round < kRounds && sender != rank_; ++round) {
            Arrived& state = found[static_cast<std::size_t>(sender)][round];
            do {
                state = look_at(sender, round, value);
            } while ((state == Arrived::no_signal || state == Arrived::no_own_signal) &&
                     now_ns() < deadline);
        }
    }
    return found;
}

// Reads the data as soon as the word after them has arrived.
GpuProbe::Arrived GpuProbe::look_at(int sender, std::size_t round, std::uint32_t value) {
    std::array<std::uint32_t, kProbeWords> seen{};
    read(words(rank_, sender, round), sizeof(seen));
    std::memcpy(seen.data(), page_.host, sizeof(seen));
    if (seen[kBehindData] != value) return Arrived::no_signal;
    read(slot(rank_, sender, round), slot_bytes_);
    const auto* bytes = static_cast<const unsigned char*>(page_.host);
    const unsigned char wanted = pattern(sender, round, value);
    const auto right = [=](unsigned char byte) { return byte == wanted; };
    if (!std::all_of(bytes, bytes + slot_bytes_, right)) return Arrived::no_data;
    return seen[kBehindKernel] == value ? Arrived::all : Arrived::no_own_signal;
}

// Reads own memory into the page.
void GpuProbe::read(GpuAddress address, std::size_t bytes) {
    gpu_->read(page_.host, address, bytes, stream_);
    drain();
}

// Waits until the stream has completed all commands.
void GpuProbe::drain() {
    const std::int64_t deadline = now_ns() + kAnswersWithinNs;
    while (!gpu_->idle(stream_)) {
        if (now_ns() > deadline) {
            throw GpuError("the probe's stream has not ended in " +
                           std::to_string(kAnswersWithinNs / 1'000'000'000) + " s");
        }
        sleep_until_ns(now_ns() + kProbeLookNs);
    }
}

}  // namespace ficco
