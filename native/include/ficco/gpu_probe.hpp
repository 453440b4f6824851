// Finding out, once per group, whether a rank's signals reach its peers behind their data. It uses
// the windows before they hold anything: their first copy's words and data, which it leaves dirty.
//
//     round   fill own slot | per peer: copy it, signal behind the copy, signal as behind a kernel
//
// There are two rounds, by calls on a stream and by a graph, each with words and slots of its own.
// Nothing waits on the device: the host looks whether the words have come, and gives up at a
// deadline.
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
    // What is known of what a peer sent in a round.
    enum class Arrived {
        all,
        no_signal,      // the word behind the data has not come
        no_data,        // the word has come, and the data before it has not
        no_own_signal,  // the word that is raised as on the caller's stream has not come
    };

    static constexpr std::size_t kRounds = 2;  // by calls, captured
    using Rounds = std::array<Arrived, kRounds>;

    // Throws std::invalid_argument where the window has no room for two slots of 16 bytes a rank.
    GpuProbe(std::shared_ptr<Gpu> gpu, std::shared_ptr<const GpuWindow> window, int rank);
    ~GpuProbe();
    GpuProbe(const GpuProbe&) = delete;
    GpuProbe& operator=(const GpuProbe&) = delete;

    // Sends both rounds to every peer. Words get the value, 1 to 255. It is the same on all ranks,
    // and no earlier one of the window.
    void send(std::uint32_t value);
    // What has come from every rank, looked at until all has or the time is over; of the own rank:
    // all. Throws GpuError where the device does not answer in that time.
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
