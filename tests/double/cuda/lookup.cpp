// cuGetProcAddress: which function a name means in which version of the interface.
#include <dlfcn.h>

#include <array>
#include <string>
#include <string_view>

#include "call.hpp"

using namespace ficco::driver_double;

namespace {

constexpr int kFound = 0;
constexpr int kUnknown = 1;
constexpr int kVersionTooLow = 2;

// Names that have meant functions of different arguments, oldest first. Every other name means the
// function so called, in all versions.
struct Meaning {
    std::string_view name;
    int since;
    const char* symbol;
};

constexpr std::array kMeanings{
    Meaning{"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    Meaning{"cuCtxCreate", 11040, "cuCtxCreate_v3"},  // neither this nor the next is here
    Meaning{"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    Meaning{"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    Meaning{"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    Meaning{"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    Meaning{"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
    Meaning{"cuGetProcAddress", 11030, "cuGetProcAddress"},
    Meaning{"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    Meaning{"cuGraphInstantiate", 10000, "cuGraphInstantiate"},
    Meaning{"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
    Meaning{"cuStreamBeginCapture", 10000, "cuStreamBeginCapture"},
    Meaning{"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    Meaning{"cuStreamGetCaptureInfo", 10010, "cuStreamGetCaptureInfo"},
    Meaning{"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    Meaning{"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    Meaning{"cuStreamGetCtx", 9020, "cuStreamGetCtx"},
    Meaning{"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"},
};

bool has_version_suffix(std::string_view name) {
    const std::size_t size = name.size();
    return size > 3 && name.substr(size - 3, 2) == "_v" && name.back() >= '0' && name.back() <= '9';
}

void* symbol_of_this_library(const char* symbol) {
    // By a handle of its own, as whoever loaded it may have kept its symbols from others.
    static void* const self = [] {
        Dl_info info{};
        dladdr(reinterpret_cast<void*>(&has_version_suffix), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return self == nullptr ? nullptr : dlsym(self, symbol);
}

int look_up(const std::string& name, int version, void*& function) {
    function = nullptr;
    if (!name.starts_with("cu") || has_version_suffix(name)) return kUnknown;
    const char* symbol = name.c_str();
    bool has_meanings = false;
    for (const Meaning& meaning : kMeanings) {
        if (meaning.name != name) continue;
        if (!has_meanings) symbol = nullptr;
        has_meanings = true;
        if (meaning.since <= version) symbol = meaning.symbol;
    }
    if (symbol == nullptr) return kVersionTooLow;
    function = symbol_of_this_library(symbol);
    return function == nullptr ? kUnknown : kFound;
}

}  // namespace

DOUBLE_API Status cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                      std::uint64_t, int* symbol_status) {
    if (const auto fault = Faults::get().take("cuGetProcAddress")) return *fault;
    if (symbol == nullptr || function == nullptr || version > Driver::get().version) {
        return kInvalidValue;
    }
    const int status = look_up(symbol, version, *function);
    if (symbol_status != nullptr) *symbol_status = status;
    return kSuccess;  // as the real one since CUDA 12, whatever was found
}

DOUBLE_API Status cuGetProcAddress(const char* symbol, void** function, int version,
                                   std::uint64_t flags) {
    const Status status = cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
    return status == kSuccess && *function == nullptr ? kNotFound : status;
}
