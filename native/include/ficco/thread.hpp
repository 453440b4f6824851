// A thread that blocks signals, so that Ctrl-C reaches a Python thread.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace ficco {

class Thread {
  public:
    // `body` must not throw. Throws std::runtime_error if the thread cannot be started.
    Thread(const std::string& name, std::function<void()> body);
    ~Thread() { join(); }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

    void join() noexcept;  // may be called again

    // Whether this process was forked from the thread's own: the thread does not exist here, and
    // objects that it waits on must not be destroyed.
    bool elsewhere() const noexcept { return getpid() != process_; }

    // For work that may never end: the thread is not joined, so `body` must own all that it uses.
    static void start_detached(const std::string& name, std::function<void()> body);

  private:
    static void* enter(void* thread);

    std::function<void()> body_;
    pid_t process_ = getpid();
    pthread_t thread_{};
    bool joined_ = false;
};

}  // namespace ficco
