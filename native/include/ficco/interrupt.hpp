// A thread that waits asks at intervals whether its wait must end, for example because Ctrl-C was
// pressed. The thread's owner defines the question.
#pragma once

#include <cstdint>

#include "ficco/clock.hpp"

namespace ficco {

using Question = bool (*)() noexcept;

inline constexpr std::int64_t kAskNs = 50'000'000;

// While it lives, waits of this thread ask `question`, if it is not null, every `kAskNs`. A
// question may make calls of its own, in a scope within this one.
class InterruptScope {
  public:
    explicit InterruptScope(Question question) noexcept : outer_(question_) {
        question_ = question;
        next_ns_ = now_ns() + kAskNs;
    }
    ~InterruptScope() { question_ = outer_; }
    InterruptScope(const InterruptScope&) = delete;
    InterruptScope& operator=(const InterruptScope&) = delete;

    // Whether a wait of this thread must end. Waits call it every few ms, without locks.
    static bool interrupted() noexcept {
        if (question_ == nullptr || now_ns() < next_ns_) return false;
        next_ns_ = now_ns() + kAskNs;
        return question_();
    }

  private:
    const Question outer_;

    static thread_local inline Question question_ = nullptr;
    static thread_local inline std::int64_t next_ns_ = 0;
};

}  // namespace ficco
