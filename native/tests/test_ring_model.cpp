// Random lives of a ring beside a model made of a list and a queue.

#include <algorithm>
#include <deque>
#include <random>

#include "check.hpp"
#include "ring_memory.hpp"

namespace {

using nitro::Message;
using ring_memory::Memory;
using ring_memory::message;
using Messages = std::vector<Message>;

class Model {
 public:
  Model(std::uint32_t seed, std::size_t capacity) : random_(seed), capacity_(capacity), memory_(capacity) {}

  void step() {
    switch (below(8)) {
      case 0:
        withdraw();
        break;
      case 1:
        damage();
        break;
      case 2:
        restart();
        break;
      case 3:
      case 4:
        take();
        break;
      default:
        publish();
    }
    CHECK(writer_.waiting() == waiting_.size() && reader_.available() == ring_.size());
    CHECK(!writer_.broken() && !reader_.broken());
    CHECK(reader_.counters().corrupt == corrupt_ && reader_.counters().received == received_);
  }

  [[nodiscard]] std::uint64_t corrupt() const { return corrupt_; }
  [[nodiscard]] std::uint64_t received() const { return received_; }
  [[nodiscard]] std::uint64_t replaced() const { return replaced_; }

 private:
  struct Slot {
    Message message;
    bool damaged = false;
  };

  std::size_t below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

  void wait(const Message& one) {
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Message& other) { return other.request == one.request; });
    if (found == waiting_.end()) {
      waiting_.push_back(one);
    } else {
      *found = one;
      ++replaced_;
    }
  }

  void publish() {
    Messages batch(below(7));
    for (Message& one : batch) one = message(below(6), ++clock_);
    const bool queue_first = !waiting_.empty();
    if (queue_first) std::for_each(batch.begin(), batch.end(), [&](const Message& one) { wait(one); });
    while (!waiting_.empty() && ring_.size() < capacity_) {
      ring_.push_back({waiting_.front()});
      waiting_.pop_front();
    }
    if (!queue_first) {
      for (const Message& one : batch) ring_.size() < capacity_ ? ring_.push_back({one}) : wait(one);
    }
    CHECK(writer_.publish(batch) == waiting_.size());
  }

  void take() {
    Messages expected;
    const std::size_t most = below(capacity_ + 2);
    while (!ring_.empty() && expected.size() < most) {
      if (ring_.front().damaged) {
        ++corrupt_;
      } else {
        expected.push_back(ring_.front().message);
      }
      ring_.pop_front();
      ++taken_;
    }
    received_ += expected.size();
    CHECK(ring_memory::drain(reader_, most) == expected);
  }

  void withdraw() {
    const std::uint64_t request = below(6);
    std::erase_if(waiting_, [&](const Message& other) { return other.request == request; });
    writer_.withdraw({&request, 1});
  }

  void damage() {
    if (ring_.empty()) return;
    const std::size_t at = below(ring_.size());
    if (ring_[at].damaged) return;  // a second time might mend it
    ring_[at].damaged = true;
    auto* bytes = reinterpret_cast<unsigned char*>(&memory_.slots[(taken_ + at) % capacity_]);
    const std::size_t byte = below(sizeof(nitro::Record));
    bytes[byte] = static_cast<unsigned char>(bytes[byte] ^ (1U << below(8)));
  }

  // The writer is gone, and what waited with it; another one comes.
  void restart() {
    waiting_.clear();
    std::destroy_at(&writer_);
    std::construct_at(&writer_, memory_.header, memory_.slots);
  }

  std::mt19937 random_;
  std::size_t capacity_;
  Memory memory_;
  nitro::RingWriter writer_{memory_.header, memory_.slots};
  nitro::RingReader reader_{memory_.header, memory_.slots};
  std::deque<Slot> ring_;
  std::deque<Message> waiting_;
  std::size_t taken_ = 0;
  std::uint64_t clock_ = 0;
  std::uint64_t corrupt_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t replaced_ = 0;
};

TEST(random_lives_agree_with_the_model) {
  for (const std::uint32_t seed : {1U, 2U, 3U, 4U}) {
    for (const std::size_t capacity : {2U, 4U, 16U}) {
      Model model(seed, capacity);
      for (int i = 0; i < 4000; ++i) model.step();
      CHECK(model.corrupt() > 100 && model.received() > 500 && model.replaced() > 50);  // or the run has tested little
    }
  }
}

}  // namespace
