// A device that does nothing, and records the commands on callers' streams.
#pragma once

#include <cstring>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "ficco/gpu.hpp"

namespace ficco::test {

class FakeGpu : public Gpu {
  public:
    struct Launched {
        KernelLaunch launch;
        std::vector<std::vector<std::byte>> parameters;
        GpuStream stream;
    };

    // Bytes of a kernel's parameters.
    std::map<GpuKernel, std::vector<std::size_t>> kernels;
    bool graph = false;                                  // whether streams are captured
    bool drops = false;                                  // whether graphs lose kernels
    std::size_t lost_copies = 0;                         // of the next ones, by graphs
    static constexpr GpuAddress kConstants = 0x7000000;  // where a value is a constant
    std::vector<BoxCopy> copied;
    bool refuses = false;     // to launch
    std::size_t encoded = 0;  // tensor maps
    std::vector<Launched> launched;
    struct Stored {
        std::vector<WordCommand> writes;
        GpuStream stream;
    };
    std::vector<Stored> stored;
    struct Awaited {
        std::vector<AwaitedValue> words;
        KernelWait wait;  // without its words
        GpuStream stream;
    };
    std::vector<Awaited> kernel_waits;
    std::string lacks = "it has no kernels";  // to store words
    std::vector<GpuStream> waited;            // for events
    std::uint64_t capture_id = 1;
    std::vector<std::string> told;  // "record", "launch", "copy", "words", "store", in order

    GpuFacts has{true, true, true, true};

    GpuFacts facts() const noexcept override { return has; }
    DeviceExtent extent() override { return {4, 2048, 1'000'000'000}; }
    std::shared_ptr<Gpu> apart() override { throw GpuError("there is no other way to it"); }
    bool one_queue() const noexcept override { return false; }
    GpuStream new_stream(bool) override { return number(); }
    void delete_stream(GpuStream) noexcept override {}
    bool idle(GpuStream) override { return true; }
    GpuEvent new_event(bool) override { return number(); }
    void delete_event(GpuEvent) noexcept override {}
    void record(GpuEvent, GpuStream) override { told.push_back("record"); }
    void wait(GpuStream stream, GpuEvent) override { waited.push_back(stream); }
    void synchronize(GpuEvent) override {}
    double elapsed_us(GpuEvent, GpuEvent) override { return 1.0; }
    void copy(const BoxCopy& box, GpuStream) override {
        told.push_back("copy");
        if (lost_copies > 0) {
            --lost_copies;
        } else {
            nodes_.push_back(Node::copy);
        }
        copied.push_back(box);
    }
    void words(std::span<const WordCommand>, GpuStream) override { told.push_back("words"); }
    GpuAddress constant(std::uint32_t value) override { return kConstants + 4 * GpuAddress{value}; }
    GpuGraph capture(GpuStream, const std::function<void()>& enqueue) override {
        enqueue();
        return number();
    }
    void replay(GpuGraph, GpuStream) override {}
    void delete_graph(GpuGraph) noexcept override {}
    const std::string& no_store() const noexcept override { return lacks; }
    const std::string& no_await() const noexcept override { return lacks; }
    void store(std::span<const WordCommand> writes, GpuStream stream) override {
        told.push_back("store");
        add_kernel();
        stored.push_back({{writes.begin(), writes.end()}, stream});
    }
    void await(const KernelWait& wait, GpuStream stream) override {
        told.push_back("await");
        add_kernel();
        kernel_waits.push_back({{wait.words.begin(), wait.words.end()}, wait, stream});
    }
    void fill(GpuAddress, unsigned char, std::size_t, GpuStream) override {}
    void read(void*, GpuAddress, std::size_t, GpuStream) override {}

    GpuKernel load_code(std::string_view, const std::string&, unsigned) override {
        throw GpuError("it has no code to load");
    }
    std::vector<std::size_t> load(GpuKernel kernel) override { return kernels.at(kernel); }
    void launch(const KernelLaunch& launch, void** parameters, GpuStream stream) override {
        if (refuses) throw GpuError("it refuses");
        told.push_back("launch");
        add_kernel();
        Launched noted{launch, {}, stream};
        for (const std::size_t bytes : kernels.at(launch.kernel)) {
            noted.parameters.emplace_back(bytes);
            std::memcpy(noted.parameters.back().data(), *parameters++, bytes);
        }
        launched.push_back(std::move(noted));
    }
    // The map contains its box, so that tests can read it.
    TensorMap encode(const TensorBox& box) override {
        static_assert(sizeof(TensorBox) <= sizeof(TensorMap));
        ++encoded;
        TensorMap map{};
        std::memcpy(map.bytes.data(), &box, sizeof(box));
        return map;
    }

    GpuAddress new_window_memory(std::size_t, WindowPart) override { return 0; }
    void delete_window_memory(GpuAddress) override {}
    void fill_words(GpuAddress, std::uint32_t, std::size_t) override {}
    void reach(int) override {}
    void synchronize_device() override {}
    HostPage new_host_page(std::size_t bytes) override {
        auto& page = pages_.emplace_back(bytes / sizeof(std::uint32_t));
        return {page.data(), reinterpret_cast<GpuAddress>(page.data())};
    }
    void delete_host_page(const HostPage&) noexcept override {}
    bool capturing(GpuStream) override { return graph; }
    CapturedNodes captured_nodes(GpuStream, std::size_t known) override {
        CapturedNodes found{nodes_.size(), 0, 0, capture_id};
        for (std::size_t i = known; i < nodes_.size(); ++i, ++types_asked) {
            ++(nodes_[i] == Node::copy ? found.copies : found.kernels);
        }
        return found;
    }

    std::size_t types_asked = 0;  // of nodes

    // A parameter of the last launch.
    template <class Value>
    Value last(std::size_t parameter) const {
        Value value;
        std::memcpy(&value, launched.back().parameters.at(parameter).data(), sizeof(value));
        return value;
    }

  protected:
    void push_current() override {}
    void pop_current() noexcept override {}

  private:
    void* number() { return reinterpret_cast<void*>(++numbers_); }

    std::uintptr_t numbers_ = 0;
    std::list<std::vector<std::uint32_t>> pages_;
    enum class Node { copy, kernel };
    void add_kernel() {
        if (!drops) nodes_.push_back(Node::kernel);
    }
    std::vector<Node> nodes_;  // captured
};

}  // namespace ficco::test
