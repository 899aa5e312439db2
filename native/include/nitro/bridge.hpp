// The two ends of the bridge: a segment and its ring. Each is used by one thread at a time, in the process that made
// it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nitro/process.hpp"
#include "nitro/ring.hpp"
#include "nitro/segment.hpp"

namespace nitro {

// The scheduler's end, which owns the segment.
class Consumer {
 public:
  Consumer(std::uint64_t engine, std::uint32_t rank, std::uint64_t capacity)
      : segment_(Segment::create(engine, rank, capacity)), reader_(segment_.header(), segment_.records()) {}

  // The messages that were there when it was called, oldest first, at most so many.
  [[nodiscard]] std::vector<Message> poll(std::size_t most) {
    segment_.check_process();
    std::vector<Message> messages(std::min(most, reader_.available()));
    messages.resize(reader_.take(messages));
    return messages;
  }

  enum class Peer { kNone, kAlive, kEnded };

  // Whether somebody writes. kEnded: without taking leave, so it crashed or was killed; another process may go on.
  [[nodiscard]] Peer producer() const {
    const ProcessKey key = segment_.header().producer.load(std::memory_order_acquire);
    if (key == 0) return Peer::kNone;
    return has_ended(key) ? Peer::kEnded : Peer::kAlive;
  }

  void unlink() { segment_.unlink(); }
  [[nodiscard]] const std::string& name() const noexcept { return segment_.name(); }
  [[nodiscard]] bool broken() const noexcept { return reader_.broken(); }
  [[nodiscard]] const ReaderCounters& counters() const noexcept { return reader_.counters(); }

 private:
  Segment segment_;
  RingReader reader_;
};

// A worker's end.
class Producer {
 public:
  explicit Producer(const std::string& name)
      : segment_(Segment::attach(name)), writer_(segment_.header(), segment_.records()) {}

  std::size_t publish(std::span<const Message> messages) {
    segment_.check_process();
    return writer_.publish(messages);
  }
  void withdraw(std::span<const std::uint64_t> requests) { writer_.withdraw(requests); }

  [[nodiscard]] bool consumer_has_ended() const { return has_ended(segment_.header().owner); }
  [[nodiscard]] std::size_t waiting() const noexcept { return writer_.waiting(); }
  [[nodiscard]] bool broken() const noexcept { return writer_.broken(); }
  [[nodiscard]] const WriterCounters& counters() const noexcept { return writer_.counters(); }

 private:
  Segment segment_;
  RingWriter writer_;
};

}  // namespace nitro
