// A log of the work that callers give to streams, in the order of the calls. Tests compare it with
// what was to be submitted.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace ficco::driver_double {

class CallLog {
  public:
    static CallLog& get();  // lives until the process ends

    void record(bool on);  // begins an empty log, or ends it
    bool on();
    void add(const void* stream, const std::string& what);
    std::string text();  // a line for each work: the stream, a space, the work

  private:
    std::mutex mutex_;
    bool on_ = false;
    std::string text_;
};

}  // namespace ficco::driver_double
