// A lane: a thread that runs jobs in order. It is independent of plans.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "ficco/thread.hpp"

namespace ficco {

class Lane {
  public:
    // The interface that a lane calls. It outlives all of its jobs.
    class Runner {
      public:
        virtual void run_range(int first, int last) noexcept = 0;

      protected:
        ~Runner() = default;
    };

    struct Job {
        Runner* runner;
        int first;
        int last;
    };

    explicit Lane(const std::string& name);  // throws std::runtime_error
    ~Lane();                                 // runs all queued jobs, then joins
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    // Never blocks for long; jobs run in the order of the pushes.
    void push(const Job& job);

  private:
    void loop();

    struct Queue {
        std::mutex mutex;
        std::condition_variable work;
        std::deque<Job> jobs;
        bool stop = false;
    };

    std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
    Thread thread_;  // last, as it uses the queue
};

}  // namespace ficco
