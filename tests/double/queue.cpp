// The threads of the double. None is joined, so that one that waits for ever ends with the process.
#include "queue.hpp"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace ficco::driver_double {

std::thread start_thread(const std::string& name, std::function<void()> body) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct Restore {
        const sigset_t& mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
    } restore{before};
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
}

std::shared_ptr<Queue> Queue::start(const std::string& name) {
    auto queue = std::make_shared<Queue>();
    start_thread(name, [queue] { queue->loop(); }).detach();
    return queue;
}

std::shared_ptr<Completion> Queue::push(std::shared_ptr<Context> context, Work work) {
    auto completion = std::make_shared<Completion>();
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(context), std::move(work), completion});
    changed_.notify_one();
    return completion;
}

void Queue::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_one();
}

void Queue::loop() {
    while (true) {
        Item item;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return closed_ || !items_.empty(); });
            if (items_.empty()) return;
            item = std::move(items_.front());
            items_.pop_front();
        }
        item.context->run(item.work);
        item.work.body = nullptr;  // what it keeps alive goes before anybody is told
        item.completion->finish();
    }
}

}  // namespace ficco::driver_double
