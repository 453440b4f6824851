// The thread of a lane and its queue. What a job does is the runner's matter.
#include "ficco/lane.hpp"

#include <signal.h>

#include <cstring>
#include <stdexcept>

#include "ficco/clock.hpp"

namespace ficco {

namespace {
// A lane calls little, but thread-local data of every loaded library lies on its stack, too.
constexpr std::size_t kStackBytes = 512 * 1024;
}  // namespace

// Signals are blocked, so that a Ctrl-C reaches a thread of Python.
Lane::Lane(const std::string& name) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int problem = pthread_create(&thread_, &attributes, &Lane::enter, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (problem != 0) {
        throw std::runtime_error("the thread of lane \"" + name +
                                 "\" cannot be started: " + std::strerror(problem));
    }
    pthread_setname_np(thread_, name.c_str());
}

Lane::~Lane() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_.notify_one();
    pthread_join(thread_, nullptr);
}

void Lane::push(const Job& job) {
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(job);
    }
    work_.notify_one();  // not under the lock, which the lane wants as soon as it wakes
}

void* Lane::enter(void* lane) {
    const PreciseSleep precise;
    static_cast<Lane*>(lane)->loop();
    return nullptr;
}

void Lane::loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const Job job = jobs_.front();
        jobs_.pop_front();
        lock.unlock();
        job.runner->run_range(job.first, job.last);
        lock.lock();
    }
}

}  // namespace ficco
