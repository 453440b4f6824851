// A thread that takes no signals, so that a Ctrl-C reaches a thread of Python.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace ficco {

class Thread {
  public:
    // `body` must not throw. Throws std::runtime_error where no thread can be had.
    Thread(const std::string& name, std::function<void()> body);
    ~Thread() { join(); }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

    void join() noexcept;  // may be called again

    // Whether this process was forked from the thread's own: the thread is not here, and what it
    // waits on may not be destroyed.
    bool elsewhere() const noexcept { return getpid() != process_; }

    // For what may never end: nobody joins it, so `body` must hold all that it uses.
    static void start_detached(const std::string& name, std::function<void()> body);

  private:
    static void* enter(void* thread);

    std::function<void()> body_;
    pid_t process_ = getpid();
    pthread_t thread_{};
    bool joined_ = false;
};

}  // namespace ficco
