// The thread of a lane and its queue. The runner implements the jobs.
#include "ficco/lane.hpp"

#include "ficco/clock.hpp"

namespace ficco {

Lane::Lane(const std::string& name) : thread_(name, [this] { loop(); }) {}

Lane::~Lane() {
    if (thread_.elsewhere()) {  // after a fork, the destructors would wait for the missing thread
        static_cast<void>(queue_.release());
        return;
    }
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->stop = true;
    }
    queue_->work.notify_one();
    thread_.join();
}

void Lane::push(const Job& job) {
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->jobs.push_back(job);
    }
    queue_->work.notify_one();  // without the lock, which the lane takes as soon as it wakes
}

void Lane::loop() {
    const PreciseSleep precise;
    Queue& queue = *queue_;
    std::unique_lock lock(queue.mutex);
    for (;;) {
        queue.work.wait(lock, [&] { return queue.stop || !queue.jobs.empty(); });
        if (queue.jobs.empty()) return;
        const Job job = queue.jobs.front();
        queue.jobs.pop_front();
        lock.unlock();
        job.runner->run_range(job.first, job.last);
        lock.lock();
    }
}

}  // namespace ficco
