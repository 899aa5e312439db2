// Messages that found no room in the ring: of each request the newest.

#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>

#include "nitro/ring_layout.hpp"

namespace nitro {

// First come, first served: a newer message takes the place of the older one in the queue, so that a request which
// speaks often cannot push back itself or others. It holds no more messages than there are requests.
class Backlog {
 public:
  // Returns whether it replaced an older message of the same request. Strong guarantee.
  bool put(const Message& message) {
    const auto found = by_request_.find(message.request);
    if (found != by_request_.end()) {
      *found->second = message;
      return true;
    }
    queue_.push_back(message);
    try {
      by_request_.emplace(message.request, std::prev(queue_.end()));
    } catch (...) {
      queue_.pop_back();
      throw;
    }
    return false;
  }

  // Returns whether there was a message of this request.
  bool erase(std::uint64_t request) {
    const auto found = by_request_.find(request);
    if (found == by_request_.end()) return false;
    queue_.erase(found->second);
    by_request_.erase(found);
    return true;
  }

  [[nodiscard]] const Message& front() const { return queue_.front(); }

  void pop() {
    by_request_.erase(queue_.front().request);
    queue_.pop_front();
  }

  [[nodiscard]] std::size_t size() const noexcept { return queue_.size(); }
  [[nodiscard]] bool empty() const noexcept { return queue_.empty(); }

 private:
  std::list<Message> queue_;
  std::unordered_map<std::uint64_t, std::list<Message>::iterator> by_request_;
};

}  // namespace nitro
