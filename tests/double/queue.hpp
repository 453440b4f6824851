// A first-in-first-out queue of operations with its own thread. A stream has a separate queue, or
// shares that of its context.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "completion.hpp"
#include "context.hpp"

namespace ficco::driver_double {

// Starts a thread that blocks signals, like those of the real driver.
std::thread start_thread(const std::string& name, std::function<void()> body);

class Queue {
  public:
    static std::shared_ptr<Queue> start(const std::string& name);

    // Returns what is finished when the work is done, or skipped as its context is over.
    std::shared_ptr<Completion> push(std::shared_ptr<Context> context, Work work);
    void close();  // the thread ends when all is done

  private:
    struct Item {
        std::shared_ptr<Context> context;
        Work work;
        std::shared_ptr<Completion> completion;
    };

    void loop();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> items_;
    bool closed_ = false;
};

}  // namespace ficco::driver_double
