// A test, once per group, whether a rank's signals reach its peers after their data. It uses the
// windows before they are in use: their first copy's words and data, which it leaves dirty.
//
//     round   fill own slot | per peer: copy it, signal after the copy, signal as after a kernel
//
// There are two rounds, by calls on a stream and by a graph, each with separate words and slots.
// The device does not wait: the host polls the words, and gives up at a deadline.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ficco/gpu.hpp"
#include "ficco/gpu_window.hpp"

namespace ficco {

class GpuProbe {
  public:
    // The known arrivals from a peer in a round.
    enum class Arrived {
        all,
        no_signal,      // the word after the data has not arrived
        no_data,        // the word has arrived without the data before it
        no_own_signal,  // the word that is raised as on the caller's stream has not arrived
    };

    static constexpr std::size_t kRounds = 2;  // by calls, captured
    using Rounds = std::array<Arrived, kRounds>;

    // Throws std::invalid_argument if the window has less than two slots of 16 bytes per rank.
    GpuProbe(std::shared_ptr<Gpu> gpu, std::shared_ptr<const GpuWindow> window, int rank);
    ~GpuProbe();
    GpuProbe(const GpuProbe&) = delete;
    GpuProbe& operator=(const GpuProbe&) = delete;

    // Sends both rounds to every peer. Words get the value, 1 to 255. It must be the same on all
    // ranks and differ from earlier values of the window.
    void send(std::uint32_t value);
    // Polls until everything has arrived or the time is over; returns the arrivals from every rank
    // (own rank: all). Throws GpuError if the device does not respond in that time.
    std::vector<Rounds> look(std::uint32_t value, double seconds);

  private:
    void enqueue(std::size_t round, std::uint32_t value);
    void raise(GpuAddress word, int peer, std::uint32_t value, bool behind_kernels);
    Arrived look_at(int sender, std::size_t round, std::uint32_t value);
    void read(GpuAddress address, std::size_t bytes);
    void drain();
    GpuAddress slot(int owner, int sender, std::size_t round) const;
    GpuAddress words(int owner, int sender, std::size_t round) const;

    const std::shared_ptr<Gpu> gpu_;
    const std::shared_ptr<const GpuWindow> window_;
    const int rank_;
    std::size_t slot_bytes_ = 0;
    GpuStream stream_ = nullptr;
    HostPage page_{};
};

}  // namespace ficco
