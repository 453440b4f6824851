// The C library's environment, to which Python's os.environ writes.
#pragma once

#include <cstdlib>
#include <string_view>

namespace ficco::bind {

// Whether a variable is set to anything other than the empty string or 0.
inline bool is_set(const char* name) {
    const char* found = std::getenv(name);
    return found != nullptr && *found != '\0' && std::string_view(found) != "0";
}

}  // namespace ficco::bind
