// Reads a launch, compares it with the driver, and fills in its parameters.
#include "ficco/gpu_launch.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "row.hpp"

namespace ficco {

namespace {

constexpr std::int64_t kTensorAlign = 16;  // bytes, for address and pitch
constexpr std::int64_t kMostBox = 256;
constexpr std::size_t kAddressBytes = sizeof(GpuAddress);
constexpr std::size_t kMapBytes = sizeof(TensorMap);
constexpr std::size_t kMapAlign = 64;
constexpr std::int64_t kMostDivisor = 1 << 20;

using Kind = LaunchParameter::Kind;

Place read_place(const Row& row, const OpLimits& limits) {
    return {row.index(4, limits.slots, "slot"), row.size(5, "row"), row.size(6, "byte"),
            row.flag(7, "other copy") ? 1 : 0};
}

std::size_t read_bytes(const Row& row, Kind kind) {
    const auto bytes = static_cast<std::size_t>(row.in(1, 0, kMapBytes, "bytes"));
    const bool number = bytes == 4 || bytes == 8;
    bool right = bytes == kAddressBytes;  // for addresses and words
    if (kind == Kind::constant) right = number || bytes == 1 || bytes == 2;
    if (kind == Kind::copy) right = number;
    if (kind == Kind::pitch) right = number || bytes == 0;
    if (kind == Kind::tensor) right = bytes == kMapBytes;
    if (!right) {
        row.refuse(1,
                   "(bytes) is " + std::to_string(bytes) + ", which no parameter of this kind has");
    }
    return bytes;
}

LaunchParameter read_parameter(const Row& row, const OpLimits& limits) {
    LaunchParameter parameter{};
    parameter.kind = static_cast<Kind>(row.in(0, 0, static_cast<int>(Kind::copy), "kind"));
    parameter.bytes = read_bytes(row, parameter.kind);
    parameter.divisor = row.in(2, 1, kMostDivisor, "divisor");
    parameter.value = row.in(3, std::numeric_limits<std::int64_t>::min(),
                             std::numeric_limits<std::int64_t>::max(), "value");
    switch (parameter.kind) {
        case Kind::constant:
        case Kind::copy:
            break;
        case Kind::word:
            row.index(3, kWordsPerCopy, "word");
            parameter.place.other_copy = row.flag(7, "other copy") ? 1 : 0;
            break;
        case Kind::pitch:
            row.size(3, "value");
            parameter.place.slot = row.index(4, limits.slots, "slot");
            parameter.element_bytes = static_cast<int>(row.in(8, 1, 16, "bytes of an element"));
            break;
        case Kind::tensor:
            parameter.box.rows = row.in(9, 1, kMost, "rows");
            parameter.box.cols = row.in(10, 1, kMost / parameter.box.rows, "columns");
            parameter.box.box_rows = static_cast<int>(row.in(11, 1, kMostBox, "rows of a box"));
            parameter.box.box_cols = static_cast<int>(row.in(12, 1, kMostBox, "columns of a box"));
            parameter.box.type = static_cast<int>(row.in(13, 0, 255, "type"));
            parameter.box.swizzle = static_cast<int>(row.in(14, 0, 255, "swizzle"));
            parameter.box.fill = static_cast<int>(row.in(15, 0, 255, "fill"));
            parameter.element_bytes = static_cast<int>(row.in(8, 1, 16, "bytes of an element"));
            parameter.box.element_bytes = parameter.element_bytes;
            [[fallthrough]];
        case Kind::address:
            parameter.place = read_place(row, limits);
            break;
    }
    return parameter;
}

std::string text_of(const std::vector<std::size_t>& sizes) {
    std::string text;
    for (const std::size_t bytes : sizes) text += (text.empty() ? "" : " ") + std::to_string(bytes);
    return text;
}

std::vector<std::size_t> sizes_of(const std::vector<LaunchParameter>& parameters) {
    std::vector<std::size_t> sizes;
    for (const LaunchParameter& parameter : parameters) {
        if (parameter.bytes > 0) sizes.push_back(parameter.bytes);
    }
    return sizes;
}

// The offset of each parameter in the C layout, and after them the end.
std::vector<std::size_t> offsets_of(const std::vector<std::size_t>& sizes) {
    std::vector<std::size_t> offsets;
    std::size_t end = 0;
    for (const std::size_t bytes : sizes) {
        const std::size_t align = bytes == kMapBytes ? kMapAlign : bytes;
        offsets.push_back((end + align - 1) / align * align);
        end = offsets.back() + bytes;
    }
    offsets.push_back(end);
    return offsets;
}

void check_facts(const GpuFacts& facts, const KernelLaunch& kernel,
                 const std::vector<LaunchParameter>& parameters) {
    if (kernel.chained && !facts.chained) {
        throw std::invalid_argument("the GPU cannot begin a kernel before the previous one ends");
    }
    const auto mapped = [](const LaunchParameter& each) { return each.kind == Kind::tensor; };
    if (!facts.tensor_maps && std::ranges::any_of(parameters, mapped)) {
        throw std::invalid_argument("the GPU has no tensor maps; pass addresses");
    }
}

bool multiple(GpuAddress address, std::int64_t divisor) {
    return address % static_cast<GpuAddress>(divisor) == 0;
}

GpuAddress address_of(const LaunchParameter& parameter, const LaunchPlaces& places) {
    const auto slot = static_cast<std::size_t>(parameter.place.slot);
    return places.bases[slot][static_cast<std::size_t>(parameter.place.other_copy)] +
           static_cast<GpuAddress>(parameter.place.row * places.pitches[slot] +
                                   parameter.place.byte);
}

std::int64_t pitch_of(const LaunchParameter& parameter, const LaunchPlaces& places) {
    return places.pitches[static_cast<std::size_t>(parameter.place.slot)];
}

bool fits_one(const LaunchParameter& parameter, const LaunchPlaces& places) {
    switch (parameter.kind) {
        case Kind::constant:
        case Kind::copy:
            return true;
        case Kind::word:
            return multiple(places.words[static_cast<std::size_t>(parameter.place.other_copy)] +
                                sizeof(std::uint32_t) * static_cast<GpuAddress>(parameter.value),
                            parameter.divisor);
        case Kind::address:
            return multiple(address_of(parameter, places), parameter.divisor);
        case Kind::tensor:
            return address_of(parameter, places) != 0 &&
                   multiple(address_of(parameter, places), kTensorAlign) &&
                   pitch_of(parameter, places) % kTensorAlign == 0 &&
                   pitch_of(parameter, places) >= parameter.box.cols * parameter.element_bytes;
        case Kind::pitch: {
            const std::int64_t bytes = pitch_of(parameter, places);
            const std::int64_t pitch = bytes / parameter.element_bytes;
            const bool small = pitch <= std::numeric_limits<std::int32_t>::max();
            return bytes % parameter.element_bytes == 0 && pitch % parameter.divisor == 0 &&
                   (parameter.value == 0 || pitch == parameter.value) &&
                   (parameter.bytes != 4 || small);
        }
    }
    return false;
}

}  // namespace

std::vector<LaunchParameter> read_parameters(std::span<const std::int64_t> fields,
                                             const OpLimits& limits) {
    if (fields.size() % kParameterFields != 0) {
        throw std::invalid_argument("parameters are not rows of " +
                                    std::to_string(kParameterFields) + " numbers");
    }
    std::vector<LaunchParameter> parameters;
    for (std::size_t number = 0; number < fields.size() / kParameterFields; ++number) {
        parameters.push_back(read_parameter(
            Row("parameters", number, fields.subspan(number * kParameterFields, kParameterFields)),
            limits));
    }
    return parameters;
}

GpuLaunch::GpuLaunch(Gpu& gpu, const LaunchBinding& binding, const OpLimits& limits)
    : kernel_(binding.kernel), parameters_(read_parameters(binding.parameters, limits)) {
    if (kernel_.kernel == nullptr) throw std::invalid_argument("the kernel has no handle");
    if (std::ranges::min(kernel_.grid) == 0 || kernel_.threads == 0) {
        throw std::invalid_argument("a launch has one block of one thread at least");
    }
    check_facts(gpu.facts(), kernel_, parameters_);
    const std::vector<std::size_t> described = sizes_of(parameters_);
    const std::vector<std::size_t> sizes = gpu.load(kernel_.kernel);
    if (described != sizes) {
        throw std::invalid_argument("the kernel was described with parameters of " +
                                    text_of(described) +
                                    " bytes, and the driver says that it takes " + text_of(sizes) +
                                    "; launch it by its own library");
    }
    const std::vector<std::size_t> offsets = offsets_of(described);
    memory_.resize((offsets.back() + sizeof(Block) - 1) / sizeof(Block));
    auto* memory = reinterpret_cast<std::byte*>(memory_.data());
    std::size_t number = 0;
    for (const LaunchParameter& parameter : parameters_) {
        std::byte* target = nullptr;
        if (parameter.bytes > 0) target = memory + offsets[number++];
        targets_.push_back(target);
        if (target == nullptr) continue;
        passed_.push_back(target);
        if (parameter.kind == Kind::constant) {
            std::memcpy(target, &parameter.value, parameter.bytes);  // little-endian
        }
    }
}

bool GpuLaunch::fits(const LaunchPlaces& places, const std::vector<bool>& slots) const {
    for (const LaunchParameter& parameter : parameters_) {
        const bool in_slot = parameter.kind == Kind::address || parameter.kind == Kind::pitch ||
                             parameter.kind == Kind::tensor;
        if (in_slot && !slots[static_cast<std::size_t>(parameter.place.slot)]) continue;
        if (!fits_one(parameter, places)) return false;
    }
    return true;
}

void GpuLaunch::run(Gpu& gpu, const LaunchPlaces& places, GpuTensorMaps& maps, GpuStream stream) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const LaunchParameter& parameter = parameters_[i];
        std::byte* target = targets_[i];
        if (target == nullptr) continue;
        switch (parameter.kind) {
            case Kind::constant:
                break;
            case Kind::copy: {
                const std::int64_t copy = places.copy;
                std::memcpy(target, &copy, parameter.bytes);
                break;
            }
            case Kind::address: {
                const GpuAddress address = address_of(parameter, places);
                std::memcpy(target, &address, sizeof(address));
                break;
            }
            case Kind::word: {
                const GpuAddress address =
                    places.words[static_cast<std::size_t>(parameter.place.other_copy)] +
                    sizeof(std::uint32_t) * static_cast<GpuAddress>(parameter.value);
                std::memcpy(target, &address, sizeof(address));
                break;
            }
            case Kind::pitch: {
                const std::int64_t pitch = pitch_of(parameter, places) / parameter.element_bytes;
                std::memcpy(target, &pitch, parameter.bytes);
                break;
            }
            case Kind::tensor: {
                TensorBox box = parameter.box;
                box.address = address_of(parameter, places);
                box.pitch = pitch_of(parameter, places);
                std::memcpy(target, &maps.find(gpu, box), sizeof(TensorMap));
                break;
            }
        }
    }
    gpu.launch(kernel_, passed_.data(), stream);
}

}  // namespace ficco
