// Starting and joining a thread by POSIX, which can set its stack and its signals.
#include "ficco/thread.hpp"

#include <signal.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace ficco {

namespace {
// A driver that makes a context calls deep, and thread-local data of every loaded library lies on a
// stack, too.
constexpr std::size_t kStackBytes = 2048 * 1024;
}  // namespace

Thread::Thread(const std::string& name, std::function<void()> body) : body_(std::move(body)) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int problem = pthread_create(&thread_, &attributes, &Thread::enter, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (problem != 0) {
        throw std::runtime_error("the thread \"" + name +
                                 "\" cannot be started: " + std::strerror(problem));
    }
    pthread_setname_np(thread_, name.c_str());
}

void Thread::join() noexcept {
    if (!joined_) pthread_join(thread_, nullptr);
    joined_ = true;
}

void* Thread::enter(void* thread) {
    static_cast<Thread*>(thread)->body_();
    return nullptr;
}

}  // namespace ficco
