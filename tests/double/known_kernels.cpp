// What kernels do: host functions of tests, and known kernels of the package.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arrivals.hpp"
#include "bell.hpp"
#include "call_log.hpp"
#include "faults.hpp"
#include "multiprocessors.hpp"
#include "vendor.hpp"
#include "work.hpp"

namespace ficco::driver_double {

namespace {

constexpr int kPolls = 200;  // before a wait pauses between looks
constexpr std::chrono::microseconds kPollPause{50};

}  // namespace

// The parameters are copied now, each as long as the kernel takes it.
Work kernel(const Kernel& kernel, const Shape& shape, void** parameters) {
    if (parameters == nullptr) throw Failure{kInvalidValue};
    const auto number = [&](std::size_t i) {
        std::uint64_t found = 0;
        std::memcpy(&found, parameters[i], sizeof(found));
        return found;
    };
    switch (kernel.known) {
        case Known::kStoring:
            return storing(*static_cast<const StoredWords*>(parameters[0]), shape);
        case Known::kAwaiting:
            return awaiting(*static_cast<const AwaitedWords*>(parameters[0]));
        case Known::kHolding:
            return holding(number(0), number(1), number(2), shape);
        case Known::kComparing:
            return comparing(number(0), number(1), static_cast<std::uint32_t>(number(2)), number(3),
                             shape);
        case Known::kOne: {
            StoredWords one{};
            one.at[0] = number(0);
            one.value[0] = one.first = one.count = 1;
            return storing(one, shape);
        }
        case Known::kNone:
            if (kernel.run == nullptr) throw Failure{kNotSupported};  // nothing stands for its code
            break;
    }
    const auto memory = std::make_shared<std::vector<TensorMap>>(kernel.parameters.size());
    for (std::size_t i = 0; i < memory->size(); ++i) {  // none is longer than a tensor map
        std::memcpy(&(*memory)[i], parameters[i], kernel.parameters[i].bytes);
    }
    return {NodeType::kKernel,
            [memory, shape, run = kernel.run](Context& context) {
                Multiprocessors::get().wait(context.device, context);
                const KernelRun running(context.device);
                std::vector<TensorMap> copy = *memory;
                std::vector<void*> given;
                for (TensorMap& parameter : copy) given.push_back(&parameter);
                run(given.data(), shape.data());
                Faults::get().count("kernel", 1);
            },
            "kernel"};
}

// As many threads as the launch has, in an order that nobody may count on: the last word of those
// first, and of the others, goes first.
Work storing(const StoredWords& words, const Shape& shape) {
    std::string log_line = "store";
    for (unsigned i = 0; CallLog::get().on() && i < words.count; ++i) {
        log_line += " " + std::to_string(words.at[i]) + "=" + std::to_string(words.value[i]);
    }
    return {NodeType::kKernel,
            [words, threads = shape[0] * shape[3]](Context& context) {
                Multiprocessors::get().wait(context.device, context);
                const auto store_all = [&](unsigned begin, unsigned end) {
                    for (unsigned i = std::min(end, threads); i-- > begin;) {
                        store(words.at[i], words.value[i], context);
                    }
                };
                store_all(0, words.first);
                store_all(words.first, words.count);
                Faults::get().count("kernel", 1);
                Faults::get().count("stored", words.count);
            },
            log_line};
}

Work awaiting(const AwaitedWords& words) {
    std::string log_line = "kernel_wait";
    for (unsigned i = 0; CallLog::get().on() && i < words.count; ++i) {
        log_line += " " + std::to_string(words.at[i]) + "=" + std::to_string(words.value[i]);
    }
    return {NodeType::kKernel,
            [words](Context& context) {
                using Clock = std::chrono::steady_clock;
                Multiprocessors::get().wait(context.device, context);
                const KernelRun running(context.device);
                const auto end = Clock::now() + std::chrono::nanoseconds(words.limit_ns);
                const auto word_of = [&](Address address) {
                    pin(context, {address, Expect::kKnown}, sizeof(std::uint32_t));
                    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address));
                };
                store(words.lane, words.mark, context);
                const auto stop = word_of(words.stop);
                std::uint32_t missing = 0;
                for (unsigned i = 0; i < words.count; ++i) {
                    const auto word = word_of(words.at[i]);
                    const auto reached = [&] {
                        Arrivals::get().acquire();
                        return word.load(std::memory_order_acquire) == words.value[i];
                    };
                    const auto gives_up = [&] {
                        return stop.load() != 0 || Clock::now() > end || context.over();
                    };
                    for (int turn = 0; !reached(); ++turn) {
                        if (gives_up()) {
                            missing = std::max(missing, words.number[i]);
                            break;
                        }
                        if (turn >= kPolls) Bell::get().pause(kPollPause);
                    }
                }
                if (missing != 0) {
                    const auto missed = word_of(words.missed);
                    if (missed.load() < missing) missed.store(missing);
                    for (const Address data : words.data) {
                        if (words.data_bytes == 0) break;
                        const auto block = pin(context, {data, Expect::kKnown}, words.data_bytes);
                        std::memset(bytes_at(data), 0xFF, words.data_bytes);
                    }
                }
                store(words.lane, 0, context);
                Faults::get().count("kernel", 1);
            },
            log_line};
}

Work holding(Address begun, Address go, std::uint64_t limit_ns, const Shape& shape) {
    return {NodeType::kKernel, [=](Context& context) {
                using Clock = std::chrono::steady_clock;
                auto& multiprocessors = Multiprocessors::get();
                multiprocessors.wait(context.device, context);
                const auto end = Clock::now() + std::chrono::nanoseconds(limit_ns);
                if (shape[0] * shape[3] >= kVendor.thread_slots)
                    multiprocessors.hold(context.device, true);
                for (unsigned block = 0; block < shape[0]; ++block) {
                    store(begun + sizeof(std::uint32_t) * block, 1, context);
                }
                const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(go));
                while (word.load(std::memory_order_acquire) == 0 && !context.over() &&
                       Clock::now() < end) {
                    Bell::get().pause(kPollPause);
                }
                multiprocessors.hold(context.device, false);
                Faults::get().count("kernel", 1);
            }};
}

Work comparing(Address data, std::uint64_t count, std::uint32_t value, Address wrong,
               const Shape& shape) {
    return {NodeType::kKernel, [=](Context& context) {
                Multiprocessors::get().wait(context.device, context);
                const KernelRun running(context.device);
                const auto memory = pin(context, {data, Expect::kKnown}, count * sizeof(value));
                const auto result = pin(context, {wrong, Expect::kKnown}, sizeof(value));
                const auto* words = reinterpret_cast<const std::uint32_t*>(data);
                const auto differing = static_cast<std::uint32_t>(
                    std::count_if(words, words + count, [=](auto word) { return word != value; }));
                std::atomic_ref(*reinterpret_cast<std::uint32_t*>(wrong))
                    .fetch_add(differing * shape[0]);
                Faults::get().count("kernel", 1);
            }};
}

}  // namespace ficco::driver_double
