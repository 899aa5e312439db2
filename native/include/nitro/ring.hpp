// A ring of records between one writer and one reader, in memory that both see. Neither ever waits for the other.
//
// The writer fills slots and then moves `head` (release); the reader looks at `head` (acquire), copies the slots, and
// then moves `tail` (release), which the writer looks at (acquire) before it fills a slot again. So a slot is never
// written and read at the same time, and a writer that dies before it moves `head` has written nothing.
//
// Nothing in the memory is trusted. Each side goes by its own counter, and compares the other's with it: counters that
// contradict each other (the memory was overwritten) end the ring for good, since then nobody can tell what was read.
// A slot is copied first and checked afterwards; one whose sequence or checksum is wrong is counted and skipped.

#pragma once

#include <cstdint>
#include <span>

#include "nitro/backlog.hpp"
#include "nitro/ring_layout.hpp"

namespace nitro {

struct WriterCounters {
  std::uint64_t published = 0;  // written into the ring
  std::uint64_t replaced = 0;   // waited, and a newer one of the same request took its place
  std::uint64_t withdrawn = 0;  // waited, and was not wanted any more
};

struct ReaderCounters {
  std::uint64_t received = 0;
  std::uint64_t corrupt = 0;  // skipped: wrong sequence or checksum
};

// One thread at a time, as the reader.
class RingWriter {
 public:
  // Goes on where the last writer stopped. slots: header.capacity of them. Both must outlive the writer.
  RingWriter(Header& header, std::span<Record> slots) noexcept;

  // Writes what waits, then `messages`. What finds no room waits, the newest message of each request only, and goes
  // out with a later call, which may bring no messages. Messages of one request are never written out of order.
  // Returns how many wait. Throws std::invalid_argument for lengths that no request has, before anything is written.
  std::size_t publish(std::span<const Message> messages);

  // Drops what waits of these requests. What the ring has already stays there.
  void withdraw(std::span<const std::uint64_t> requests);

  [[nodiscard]] std::size_t waiting() const noexcept { return backlog_.size(); }
  [[nodiscard]] bool broken() const noexcept { return broken_; }
  [[nodiscard]] const WriterCounters& counters() const noexcept { return counters_; }

 private:
  [[nodiscard]] std::uint64_t room() noexcept;
  void put(const Message& message, std::uint64_t sequence) noexcept;

  Header& header_;
  std::span<Record> slots_;
  std::uint64_t seed_;
  std::uint64_t head_;
  std::uint64_t tail_;  // the reader's, as last seen
  bool broken_ = false;
  Backlog backlog_;
  WriterCounters counters_;
};

class RingReader {
 public:
  RingReader(Header& header, std::span<const Record> slots) noexcept;

  // How many records there are to look at; take() hands out so many at most.
  [[nodiscard]] std::size_t available() noexcept;

  // Copies the next whole records to `out`, oldest first, until it is full or the ring is empty; returns how many.
  [[nodiscard]] std::size_t take(std::span<Message> out) noexcept;

  [[nodiscard]] bool broken() const noexcept { return broken_; }
  [[nodiscard]] const ReaderCounters& counters() const noexcept { return counters_; }

 private:
  Header& header_;
  std::span<const Record> slots_;
  std::uint64_t seed_;
  std::uint64_t head_;  // the writer's, as last seen
  std::uint64_t tail_;
  bool broken_ = false;
  ReaderCounters counters_;
};

}  // namespace nitro
