// The thread of a lane and its queue. What a job does is the runner's matter.
#include "ficco/lane.hpp"

#include "ficco/clock.hpp"

namespace ficco {

Lane::Lane(const std::string& name) : thread_(name, [this] { loop(); }) {}

Lane::~Lane() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_.notify_one();
    thread_.join();
}

void Lane::push(const Job& job) {
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(job);
    }
    work_.notify_one();  // not under the lock, which the lane wants as soon as it wakes
}

void Lane::loop() {
    const PreciseSleep precise;
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
