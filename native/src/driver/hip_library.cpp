// Finds and opens the HIP library.
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "ficco/hip.hpp"

namespace ficco::hip {

namespace {

constexpr std::string_view kName = "libamdhip64.so";
constexpr std::array kFileNames{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
// The first version with copies without compute units (hipMemcpyDeviceToDeviceNoCU).
constexpr int kOldest = 60100000;

std::string version_text(int version) {
    return std::to_string(version / 10'000'000) + "." + std::to_string(version / 100'000 % 100);
}

bool same_file(const std::string& one, const std::string& other) {
    struct stat first{};
    struct stat second{};
    if (stat(one.c_str(), &first) != 0 || stat(other.c_str(), &second) != 0) return one == other;
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

// The HIP libraries that the process has loaded, each file once.
std::vector<std::string> loaded_libraries() {
    std::vector<std::string> paths;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* data) {
            const std::string path = info->dlpi_name;
            const std::string_view file = std::string_view(path).substr(path.rfind('/') + 1);
            auto& found = *static_cast<std::vector<std::string>*>(data);
            if (!file.starts_with(kName)) return 0;
            for (const std::string& other : found) {
                if (same_file(path, other)) return 0;
            }
            found.push_back(path);
            return 0;
        },
        &paths);
    return paths;
}

std::string load_error() {
    const char* text = dlerror();
    return text == nullptr ? "no reason is given" : text;
}

void* open_handle() {
    const std::vector<std::string> loaded = loaded_libraries();
    if (loaded.size() > 1) {
        throw GpuError(
            "the process has two HIP libraries, which do not share streams and memory: " +
            loaded[0] + " and " + loaded[1] + "; load one, for example by LD_LIBRARY_PATH");
    }
    if (!loaded.empty()) {
        void* handle = dlopen(loaded[0].c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (handle != nullptr) return handle;
        throw GpuError(loaded[0] + " is loaded, and cannot be opened again: " + load_error());
    }
    std::string reason;
    for (const char* name : kFileNames) {
        if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL); handle != nullptr) return handle;
        reason += (reason.empty() ? "" : "; ") + load_error();
    }
    throw GpuError("no HIP library is found (" + reason +
                   "); install ROCm 6.1 or later, or PyTorch for ROCm");
}

std::string path_of(const void* function) {
    Dl_info info{};
    return dladdr(function, &info) != 0 ? info.dli_fname : std::string(kName);
}

// Fills the table. Returns the names of functions that the library lacks.
std::string fill(Table& table, void* handle) {
    std::string missing;
    const auto load = [&](const char* name) {
        void* function = dlsym(handle, name);
        if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
        return function;
    };
#define FICCO_LOAD(result, name, arguments) \
    table.name = reinterpret_cast<decltype(table.name)>(load(#name));
    FICCO_HIP_FUNCTIONS(FICCO_LOAD)
#undef FICCO_LOAD
    return missing;
}

Library open_library() {
    void* handle = open_handle();
    Library library{};
    const std::string missing = fill(library.table, handle);
    if (library.table.hipDriverGetVersion == nullptr) {
        throw GpuError("the library " + std::string(kName) +
                       " has no hipDriverGetVersion; it is no HIP library");
    }
    library.path = path_of(reinterpret_cast<const void*>(library.table.hipDriverGetVersion));
    const Status status = library.table.hipDriverGetVersion(&library.version);
    const std::string found = library.path + " is HIP " +
                              (status == kSuccess ? version_text(library.version) : "(unknown)");
    const std::string wanted = "; ficco needs HIP " + version_text(kOldest) +
                               " or later: install a newer ROCm, or PyTorch for one";
    if (!missing.empty()) throw GpuError(found + " and has no " + missing + wanted);
    if (status != kSuccess) {
        throw GpuError(library.path + ": hipDriverGetVersion answers " + std::to_string(status));
    }
    if (library.version < kOldest) throw GpuError(found + wanted);
    return library;
}

}  // namespace

const Library& library() {
    // Never freed: a thread may be blocked in the driver until the process has ended.
    static const Library& opened = *new Library(open_library());
    return opened;
}

void check(Status status, const char* call) {
    if (status == kSuccess) return;
    const Table& table = library().table;
    table.hipGetLastError();
    const char* name = table.hipGetErrorName(status);
    const char* text = table.hipGetErrorString(status);
    throw GpuError(std::string(call) + " answers " +
                   (name == nullptr ? std::to_string(status) : name) +
                   (text == nullptr ? "" : std::string(": ") + text));
}

}  // namespace ficco::hip
