// The objects of handles. The driver's mutex guards all fields.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "completion.hpp"
#include "context.hpp"
#include "queue.hpp"

namespace ficco::driver_double {

struct Capture;

struct Stream {
    StreamHandle handle;
    std::shared_ptr<Context> context;
    unsigned flags;
    int priority;
    std::shared_ptr<Queue> queue;
    bool shares_queue;
    std::shared_ptr<Completion> last;      // of what was enqueued last; null before
    std::shared_ptr<Capture> capture;      // null where nothing is being captured
    std::vector<NodeHandle> dependencies;  // of the next node of the capture
    std::vector<EdgeData> edges{};         // of these, as cuStreamGetCaptureInfo has shown them
};

struct Event {
    EventHandle handle;
    std::shared_ptr<Context> context;
    unsigned flags;
    std::shared_ptr<Completion> last;      // of the last record; null where there is none
    std::shared_ptr<Capture> capture;      // in which it was last recorded, even if that has ended
    std::vector<NodeHandle> dependencies;  // of whoever waits for it in the capture
};

// The objects of one kind by handle.
template <class Object>
class Registry {
  public:
    explicit Registry(Status unknown = kInvalidHandle) : unknown_(unknown) {}

    void add(std::shared_ptr<Object> object) { objects_[object->handle] = std::move(object); }

    std::shared_ptr<Object> find(Handle handle) const {
        const auto found = objects_.find(handle);
        if (found == objects_.end()) throw Failure{unknown_};
        return found->second;
    }

    std::shared_ptr<Object> take(Handle handle) {
        std::shared_ptr<Object> object = find(handle);
        objects_.erase(handle);
        return object;
    }

    template <class Predicate>
    std::vector<std::shared_ptr<Object>> select(Predicate predicate) const {
        std::vector<std::shared_ptr<Object>> selected;
        for (const auto& [handle, object] : objects_) {
            if (predicate(*object)) selected.push_back(object);
        }
        return selected;
    }

  private:
    Status unknown_;
    std::map<Handle, std::shared_ptr<Object>> objects_;
};

Handle new_handle();  // never used before

}  // namespace ficco::driver_double
