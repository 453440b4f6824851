// The log, and the functions by which tests read it.
#include "call_log.hpp"

#include "call.hpp"

namespace ficco::driver_double {

CallLog& CallLog::get() {
    static CallLog& log = *new CallLog;
    return log;
}

void CallLog::record(bool on) {
    const std::lock_guard lock(mutex_);
    on_ = on;
    if (on) text_.clear();
}

bool CallLog::on() {
    const std::lock_guard lock(mutex_);
    return on_;
}

void CallLog::add(const void* stream, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (!on_ || what.empty()) return;
    text_ += std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + " " + what + "\n";
}

std::string CallLog::text() {
    const std::lock_guard lock(mutex_);
    return text_;
}

}  // namespace ficco::driver_double

using ficco::driver_double::CallLog;

// Begins an empty log, or ends it.
DOUBLE_API void ficcoDoubleRecord(int on) { CallLog::get().record(on != 0); }

// The log as text; it lasts until the next call of this function.
DOUBLE_API const char* ficcoDoubleRecorded() {
    static std::string* const last = new std::string;
    *last = CallLog::get().text();
    return last->c_str();
}
