// Launches outside programs.
#include "ficco/gpu_call.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ficco {

namespace {

GpuLaunch launch_of(Gpu& gpu, const LaunchBinding& binding, int slots) {
    const Gpu::Current current(gpu);
    GpuLaunch launch(gpu, binding, {.world = 1, .segments = 1, .steps = 1, .slots = slots});
    const auto of_program = [](const LaunchParameter& parameter) {
        using Kind = LaunchParameter::Kind;
        return parameter.kind == Kind::word || parameter.kind == Kind::copy;
    };
    if (std::ranges::any_of(launch.parameters(), of_program)) {
        throw std::invalid_argument(
            "a launch by itself has no own words and no copies of a window; set it in a program");
    }
    return launch;
}

}  // namespace

GpuCall::GpuCall(std::shared_ptr<Gpu> gpu, const LaunchBinding& binding, int slots)
    : gpu_(std::move(gpu)),
      launch_(launch_of(*gpu_, binding, slots)),
      slots_(static_cast<std::size_t>(slots)) {}

void GpuCall::run(std::span<const GpuAddress> addresses, std::span<const std::int64_t> pitches,
                  GpuStream stream) {
    if (addresses.size() != slots_ || pitches.size() != slots_) {
        throw std::invalid_argument("the launch has " + std::to_string(slots_) +
                                    " slots; give an address and a pitch for each");
    }
    std::vector<std::array<GpuAddress, kWindowCopies>> bases;
    bases.reserve(slots_);
    for (const GpuAddress address : addresses) bases.push_back({address, address});
    const LaunchPlaces places{bases, pitches, {0, 0}, 0};
    if (!launch_.fits(places, std::vector<bool>(slots_, true))) {
        throw std::invalid_argument(
            "the kernel was not compiled for matrices of these addresses and pitches");
    }
    const Gpu::Current current(*gpu_);
    launch_.run(*gpu_, places, maps_, stream);
}

}  // namespace ficco
