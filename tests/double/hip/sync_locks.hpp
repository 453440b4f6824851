// Streams that are locked while a thread waits for them (#11678 of rocm-systems): with clr, a call
// of another thread on a stream can block until a hipStreamSynchronize on it has returned. So a
// thread that is to release a stuck stream must call nothing on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "abi.hpp"

namespace ficco::driver_double {

class SyncLocks {
  public:
    static SyncLocks& get();  // lives until the process ends

    std::atomic<bool> on;

    // Returns when no other thread waits for the stream.
    void pass(StreamHandle stream);

    // A wait of this thread for a stream.
    class Held {
      public:
        explicit Held(StreamHandle stream);
        ~Held();
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;

      private:
        const StreamHandle stream_;
    };

  private:
    SyncLocks();

    bool free(StreamHandle stream) const;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::multimap<StreamHandle, std::thread::id> waiting_;
};

}  // namespace ficco::driver_double
