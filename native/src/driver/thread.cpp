// Start and join of a thread by POSIX, which can set its stack size and signal mask.
#include "ficco/thread.hpp"

#include <signal.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

namespace ficco {

namespace {
// A driver that creates a context has deep call chains, and the stack also holds the thread-local
// data of every loaded library.
constexpr std::size_t kStackBytes = 2048 * 1024;

pthread_t start(const std::string& name, void* (*enter)(void*), void* argument) {
    pthread_t thread{};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int problem = pthread_create(&thread, &attributes, enter, argument);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (problem != 0) {
        throw std::runtime_error("the thread \"" + name +
                                 "\" cannot be started: " + std::strerror(problem));
    }
    pthread_setname_np(thread, name.c_str());
    return thread;
}

}  // namespace

Thread::Thread(const std::string& name, std::function<void()> body)
    : body_(std::move(body)), thread_(start(name, &Thread::enter, this)) {}

void Thread::start_detached(const std::string& name, std::function<void()> body) {
    using Body = std::function<void()>;
    auto held = std::make_unique<Body>(std::move(body));
    const auto enter = [](void* given) -> void* {
        const std::unique_ptr<Body> own(static_cast<Body*>(given));
        (*own)();
        return nullptr;
    };
    const pthread_t thread = start(name, enter, held.get());
    static_cast<void>(held.release());  // owned by the thread
    pthread_detach(thread);
}

void Thread::join() noexcept {
    if (!joined_ && !elsewhere()) pthread_join(thread_, nullptr);
    joined_ = true;
}

void* Thread::enter(void* thread) {
    static_cast<Thread*>(thread)->body_();
    return nullptr;
}

}  // namespace ficco
