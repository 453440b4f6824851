// The launches of a program's compute, and the matrices that they fit.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ficco/gpu_program.hpp"

namespace ficco {

LaunchPlaces GpuProgram::places(int copy) const {
    const int rank = rank_->rank();
    return {bases_, pitches_, {window_->words(rank, copy), window_->words(rank, copy ^ 1)}, copy};
}

void GpuProgram::set_launches(int segment, int step, int mark,
                              std::span<const LaunchBinding> launches) {
    const int steps = static_cast<int>(stamped_.size());
    if (running_) throw std::runtime_error("a call runs; finish it before setting launches");
    if (segment < 0 || segment + 1 >= static_cast<int>(works_.size())) {
        throw std::invalid_argument("segment is " + std::to_string(segment) + ", not 0 to " +
                                    std::to_string(static_cast<int>(works_.size()) - 2) +
                                    "; nothing is computed behind the last one");
    }
    if (step < 0 || step >= steps || mark < -1 || mark >= steps) {
        throw std::invalid_argument("step is " + std::to_string(step) + " and mark " +
                                    std::to_string(mark) + "; the plan has " +
                                    std::to_string(steps) + " steps");
    }
    const OpLimits limits{window_->world(), static_cast<int>(works_.size()), steps,
                          static_cast<int>(bases_.size())};
    const Gpu::Current current(rank_->gpu());
    GpuWork work{step, mark, {}};
    for (const LaunchBinding& launch : launches) {
        work.launches.emplace_back(rank_->gpu(), launch, limits);
        check_launch(work.launches.back());
    }
    works_[static_cast<std::size_t>(segment)] = std::move(work);
}

// Addresses in a window are the same in every call.
void GpuProgram::check_launch(const GpuLaunch& launch) const {
    std::vector<std::array<GpuAddress, kWindowCopies>> bases(bases_.size());
    std::vector<std::int64_t> pitches(bases_.size());
    for (const int copy : {0, 1}) {
        for (const WindowSlot& slot : window_slots_) {
            const auto index = static_cast<std::size_t>(slot.slot);
            const auto offset = static_cast<GpuAddress>(slot.offset);
            bases[index] = {window_->data(slot.rank, copy) + offset,
                            window_->data(slot.rank, copy ^ 1) + offset};
            pitches[index] = slot.pitch;
        }
        LaunchPlaces in_call = places(copy);
        in_call.bases = bases;
        in_call.pitches = pitches;
        if (!launch.fits(in_call, slot_is_window_)) {
            throw std::invalid_argument(
                "the launch is not for matrices where they lie in the window; describe one that "
                "is compiled for their addresses and pitches");
        }
    }
    for (const LaunchParameter& parameter : launch.parameters()) {
        const auto index = static_cast<std::size_t>(parameter.place.slot);
        const bool tensor = parameter.kind == LaunchParameter::Kind::tensor;
        if (!tensor && parameter.kind != LaunchParameter::Kind::address) continue;
        if (!slot_is_window_[index]) continue;
        const auto slot = std::ranges::find(window_slots_, parameter.place.slot, &WindowSlot::slot);
        const std::int64_t rows = tensor ? parameter.box.rows : 1;
        const std::int64_t row_bytes = tensor ? parameter.box.cols * parameter.element_bytes : 1;
        const std::int64_t end =
            slot->offset + end_of_box(parameter.place, rows, row_bytes, slot->pitch);
        if (static_cast<std::size_t>(end) > window_->data_bytes()) {
            throw std::invalid_argument("a launch reads " + std::to_string(end) +
                                        " bytes of a window copy, which has " +
                                        std::to_string(window_->data_bytes()));
        }
    }
}

bool GpuProgram::fits(std::span<const std::uint64_t> addresses,
                      std::span<const std::int64_t> pitches) const {
    check_slots(addresses, pitches);
    std::vector<std::array<GpuAddress, kWindowCopies>> bases;
    bases.reserve(addresses.size());
    for (const std::uint64_t address : addresses) bases.push_back({address, address});
    LaunchPlaces in_call = places(0);  // words have been checked already
    in_call.bases = bases;
    in_call.pitches = pitches;
    for (const auto& work : works_) {
        if (!work) continue;
        for (const GpuLaunch& launch : work->launches) {
            if (!launch.fits(in_call, slot_is_given_)) return false;
        }
    }
    return true;
}

}  // namespace ficco
