#include "nitro/ring.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "text.hpp"

namespace nitro {
namespace {

bool lengths_fit(const Message& message) {
  return 0 <= message.keep && message.keep <= message.physical_len && message.physical_len <= message.logical_len;
}

void check(const Message& message) {
  if (!lengths_fit(message)) {
    throw std::invalid_argument(text("request ", message.request, ": keep=", message.keep,
                                     ", physical_len=", message.physical_len, ", logical_len=", message.logical_len,
                                     " are not 0 <= keep <= physical_len <= logical_len: publish what was scored"));
  }
  if (message.flags != 0) {
    throw std::invalid_argument(text("request ", message.request, ": flags=", message.flags, " are unknown to version ",
                                     kLayoutVersion, " of the layout: pass 0"));
  }
}

// Whether a writer has written this record, in this place of this ring, as far as can be seen.
bool is_whole(const Record& record, std::uint64_t sequence, std::uint64_t seed) {
  return record.sequence == sequence && record.checksum == checksum_of(record, seed) && record.reserved == 0 &&
         record.message.flags == 0 && lengths_fit(record.message);
}

}  // namespace

RingWriter::RingWriter(Header& header, std::span<Record> slots) noexcept
    : header_(header),
      slots_(slots),
      seed_(seed_of(header.engine, header.rank)),
      head_(header.head.load(std::memory_order_relaxed)),  // ours, or the last writer's, who is gone
      tail_(header.tail.load(std::memory_order_acquire)) {
  broken_ = head_ - tail_ > slots_.size();
}

std::size_t RingWriter::publish(std::span<const Message> messages) {
  std::for_each(messages.begin(), messages.end(), check);
  const auto wait = [this](std::span<const Message> later) {
    for (const Message& message : later) {
      if (backlog_.put(message)) ++counters_.replaced;
    }
  };
  if (!backlog_.empty()) {  // the new ones first, so that none is written which they replace
    wait(messages);
    messages = {};
  }
  std::uint64_t free = room();
  std::uint64_t next = head_;
  for (; free > 0 && !backlog_.empty(); --free) {
    put(backlog_.front(), next++);
    backlog_.pop();
  }
  const std::size_t direct = std::min<std::size_t>(free, messages.size());
  for (const Message& message : messages.first(direct)) put(message, next++);

  // Once for all of them: each move takes the line away from the reader. Release: the slots come before it.
  if (next != head_) header_.head.store(next, std::memory_order_release);
  counters_.published += next - head_;
  head_ = next;

  wait(messages.subspan(direct));
  return backlog_.size();
}

void RingWriter::withdraw(std::span<const std::uint64_t> requests) {
  for (const std::uint64_t request : requests) {
    if (backlog_.erase(request)) ++counters_.withdrawn;
  }
}

// Acquire: what the reader copied out of the slots that it gave back, it has copied before they are written again.
std::uint64_t RingWriter::room() noexcept {
  const std::uint64_t tail = header_.tail.load(std::memory_order_acquire);
  if (tail < tail_ || tail > head_) broken_ = true;  // it only grows, and never passes what was written
  if (broken_) return 0;
  tail_ = tail;
  return slots_.size() - (head_ - tail_);
}

void RingWriter::put(const Message& message, std::uint64_t sequence) noexcept {
  Record record{.message = message, .reserved = 0, .sequence = sequence, .checksum = 0};
  record.checksum = checksum_of(record, seed_);
  slots_[sequence & (slots_.size() - 1)] = record;
}

RingReader::RingReader(Header& header, std::span<const Record> slots) noexcept
    : header_(header),
      slots_(slots),
      seed_(seed_of(header.engine, header.rank)),
      head_(header.tail.load(std::memory_order_relaxed)),
      tail_(head_) {}

// Acquire: the slots that the writer filled before it moved its counter are seen with it.
std::size_t RingReader::available() noexcept {
  const std::uint64_t head = header_.head.load(std::memory_order_acquire);
  if (head < head_ || head - tail_ > slots_.size()) broken_ = true;
  if (broken_) return 0;
  head_ = head;
  return static_cast<std::size_t>(head_ - tail_);
}

std::size_t RingReader::take(std::span<Message> out) noexcept {
  const std::uint64_t end = tail_ + available();
  const std::uint64_t start = tail_;
  std::size_t count = 0;
  for (; tail_ != end && count < out.size(); ++tail_) {
    const Record record = slots_[tail_ & (slots_.size() - 1)];
    std::atomic_signal_fence(std::memory_order_acq_rel);  // or the compiler may read the slot again after the check
    if (is_whole(record, tail_, seed_)) {
      out[count++] = record.message;
    } else {
      ++counters_.corrupt;
    }
  }
  // Release: the copies come before it.
  if (tail_ != start) header_.tail.store(tail_, std::memory_order_release);
  counters_.received += count;
  return count;
}

}  // namespace nitro
