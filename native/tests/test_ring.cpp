// The ring by itself: each rule, each kind of damage, and a writer and a reader in two threads.

#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "ring_memory.hpp"

namespace {

using nitro::Message;
using nitro::Record;
using nitro::RingReader;
using nitro::RingWriter;
using ring_memory::drain;
using ring_memory::Memory;
using ring_memory::message;
using ring_memory::whole;
using Messages = std::vector<Message>;

struct Ends {
  explicit Ends(std::uint64_t capacity) : memory(capacity) {}
  Memory memory;
  RingWriter writer{memory.header, memory.slots};
  RingReader reader{memory.header, memory.slots};
};

TEST(a_checksum_differs_where_one_word_does) {
  const Record record{.message = message(5, 6), .reserved = 0, .sequence = 9, .checksum = 0};
  const std::uint64_t sum = nitro::checksum_of(record, 1);
  CHECK(sum == nitro::checksum_of(record, 1));
  CHECK(sum != nitro::checksum_of(record, 2));
  for (std::size_t byte = 0; byte < offsetof(Record, checksum); ++byte) {
    for (const int bit : {0, 3, 7}) {
      std::array<unsigned char, sizeof(Record)> bytes;
      std::memcpy(bytes.data(), &record, sizeof(Record));
      bytes[byte] = static_cast<unsigned char>(bytes[byte] ^ (1 << bit));
      Record other;
      std::memcpy(&other, bytes.data(), sizeof(Record));
      CHECK(nitro::checksum_of(other, 1) != sum);
    }
  }
  CHECK(nitro::checksum_of(Record{}, nitro::seed_of(0, 0)) != 0);  // memory that was never written is no record
  CHECK(nitro::seed_of(1, 0) != nitro::seed_of(0, 1));
}

TEST(messages_arrive_in_order_and_once) {
  Ends ends(4);
  CHECK(drain(ends.reader).empty());
  for (std::uint64_t step = 0; step < 100; step += 3) {  // over the end of the slots again and again
    const Messages sent{message(1, step), message(2, step + 1), message(1, step + 2)};
    CHECK(ends.writer.publish(sent) == 0);
    CHECK(ends.reader.available() == 3);
    CHECK(drain(ends.reader) == sent);
    CHECK(drain(ends.reader).empty());
  }
  CHECK(ends.writer.counters().published == 102 && ends.reader.counters().received == 102);
}

TEST(a_poll_takes_as_many_as_it_is_asked_for) {
  Ends ends(4);
  CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2), message(3, 3)}) == 0);
  CHECK(drain(ends.reader, 0).empty());
  CHECK((drain(ends.reader, 2) == Messages{message(1, 1), message(2, 2)}));
  CHECK((drain(ends.reader, 2) == Messages{message(3, 3)}));
}

TEST(of_what_finds_no_room_the_newest_of_each_request_waits) {
  Ends ends(2);
  CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 1), message(3, 1), message(4, 1)}) == 2);
  CHECK(ends.writer.publish(Messages{message(4, 2), message(3, 2), message(1, 2)}) == 3);
  CHECK(ends.writer.counters().replaced == 2);
  CHECK((drain(ends.reader) == Messages{message(1, 1), message(2, 1)}));
  CHECK(drain(ends.reader).empty());

  // In the order in which the requests began to wait; a new message replaces a waiting one before it is written.
  CHECK(ends.writer.publish(Messages{message(3, 3)}) == 1);
  CHECK((drain(ends.reader) == Messages{message(3, 3), message(4, 2)}));
  CHECK(ends.writer.publish({}) == 0);
  CHECK((drain(ends.reader) == Messages{message(1, 2)}));
  CHECK(ends.writer.counters().published == 5 && ends.writer.counters().replaced == 3);
}

TEST(what_waits_can_be_withdrawn) {
  Ends ends(2);
  CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 1), message(3, 1), message(4, 1), message(5, 1)}) == 3);
  ends.writer.withdraw(std::array<std::uint64_t, 4>{1, 4, 4, 99});  // 1 is in the ring, 99 nowhere
  CHECK(ends.writer.waiting() == 2 && ends.writer.counters().withdrawn == 1);
  CHECK(drain(ends.reader).size() == 2);
  CHECK(ends.writer.publish({}) == 0);
  CHECK((drain(ends.reader) == Messages{message(3, 1), message(5, 1)}));
}

TEST(impossible_messages_are_refused_as_a_whole) {
  Ends ends(4);
  const auto refused = [&](std::int32_t keep, std::int32_t physical, std::int32_t logical) {
    Message wrong = message(7, 1);
    wrong.keep = keep;
    wrong.physical_len = physical;
    wrong.logical_len = logical;
    CHECK_THROWS(std::invalid_argument, ends.writer.publish(Messages{message(1, 1), wrong}), "request 7: keep=");
  };
  refused(-1, 5, 5);
  refused(6, 5, 5);
  refused(5, 6, 5);
  refused(std::numeric_limits<std::int32_t>::max(), 0, 0);
  Message flagged = message(7, 1);
  flagged.flags = 2;
  CHECK_THROWS(std::invalid_argument, ends.writer.publish(Messages{flagged}), "request 7: flags=2");
  CHECK(ends.writer.waiting() == 0 && drain(ends.reader).empty());
}

TEST(damaged_records_are_counted_and_skipped) {
  for (std::size_t byte = 0; byte < sizeof(Record); ++byte) {
    Ends ends(4);
    CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2), message(3, 3)}) == 0);
    auto* bytes = reinterpret_cast<unsigned char*>(&ends.memory.slots[1]);
    bytes[byte] = static_cast<unsigned char>(bytes[byte] ^ 0x10);
    CHECK((drain(ends.reader) == Messages{message(1, 1), message(3, 3)}));
    CHECK(ends.reader.counters().corrupt == 1 && !ends.reader.broken());
    CHECK(ends.writer.publish(Messages{message(4, 4)}) == 0);
    CHECK((drain(ends.reader) == Messages{message(4, 4)}));
  }
}

// With a checksum that is right: what no writer of ours would have written is not handed out either.
TEST(impossible_records_are_damaged) {
  const auto skipped = [](auto change) {
    Ends ends(4);
    CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2)}) == 0);
    Record& record = ends.memory.slots[0];
    change(record);
    record.checksum = nitro::checksum_of(record, nitro::seed_of(ends.memory.header.engine, ends.memory.header.rank));
    CHECK((drain(ends.reader) == Messages{message(2, 2)}) && ends.reader.counters().corrupt == 1);
  };
  skipped([](Record& record) { record.message.keep = -1; });
  skipped([](Record& record) { record.message.keep = record.message.physical_len + 1; });
  skipped([](Record& record) { record.message.physical_len = record.message.logical_len + 1; });
  skipped([](Record& record) { record.message.flags = 1; });
  skipped([](Record& record) { record.reserved = 1; });
}

TEST(records_out_of_place_are_damaged) {
  Ends ends(4);
  const auto send = [&](std::uint64_t step) {
    CHECK(ends.writer.publish(Messages{message(1, step), message(2, step), message(3, step), message(4, step)}) == 0);
  };
  send(1);
  const std::vector<Record> last_lap = ends.memory.slots;
  CHECK(drain(ends.reader).size() == 4);
  send(2);
  ends.memory.slots[0] = last_lap[0];                     // as it was one lap before
  std::swap(ends.memory.slots[1], ends.memory.slots[2]);  // reordered
  CHECK((drain(ends.reader) == Messages{message(4, 2)}));
  send(3);
  ends.memory.slots[3] = ends.memory.slots[2];  // twice
  CHECK((drain(ends.reader) == Messages{message(1, 3), message(2, 3), message(3, 3)}));
  CHECK(ends.reader.counters().corrupt == 4);

  Memory other(4, 78);
  RingWriter stranger(other.header, other.slots);
  CHECK(stranger.publish(Messages{message(9, 9)}) == 0);
  Ends fresh(4);
  CHECK(fresh.writer.publish(Messages{message(1, 1)}) == 0);
  fresh.memory.slots[0] = other.slots[0];  // whole, in its place, but of another ring
  CHECK(drain(fresh.reader).empty() && fresh.reader.counters().corrupt == 1);
}

TEST(counters_that_contradict_each_other_end_the_ring) {
  const auto reads = [](std::uint64_t head) {
    Ends ends(4);
    CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2)}) == 0);
    CHECK(drain(ends.reader, 1).size() == 1);
    ends.memory.header.head.store(head);
    CHECK(drain(ends.reader).empty() && ends.reader.broken() && ends.reader.available() == 0);
    ends.memory.header.head.store(3);  // it doesn't come back to life
    CHECK(drain(ends.reader).empty() && ends.reader.broken());
  };
  reads(1);  // backwards
  reads(0);
  reads(6);  // more than there is room for
  reads(std::numeric_limits<std::uint64_t>::max());

  const auto writes = [](std::uint64_t tail) {
    Ends ends(4);
    CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2)}) == 0);
    CHECK(drain(ends.reader, 1).size() == 1);
    CHECK(ends.writer.publish({}) == 0);
    ends.memory.header.tail.store(tail);
    CHECK(ends.writer.publish(Messages{message(3, 3)}) == 1 && ends.writer.broken());
    ends.memory.header.tail.store(1);
    CHECK(ends.writer.publish({}) == 1 && ends.writer.broken());
  };
  writes(0);
  writes(3);
  writes(std::numeric_limits<std::uint64_t>::max());

  Memory memory(4);
  memory.header.head.store(5);
  RingWriter late(memory.header, memory.slots);
  CHECK(late.broken() && late.publish(Messages{message(1, 1)}) == 1);
}

TEST(another_writer_goes_on_where_the_last_one_stopped) {
  Ends ends(4);
  CHECK(ends.writer.publish(Messages{message(1, 1), message(2, 2), message(3, 3)}) == 0);
  CHECK(drain(ends.reader, 1).size() == 1);
  // Killed while it wrote a record: the counter has not moved.
  ends.memory.slots[3].sequence = 3;
  ends.memory.slots[3].message = message(4, 4);
  RingWriter next(ends.memory.header, ends.memory.slots);
  CHECK((drain(ends.reader) == Messages{message(2, 2), message(3, 3)}));
  CHECK(next.publish(Messages{message(5, 5)}) == 0);
  CHECK((drain(ends.reader) == Messages{message(5, 5)}));
  CHECK(ends.reader.counters().corrupt == 0);
}

// What the thread sanitizer is for: both ends at once, in a ring so small that it is full most of the time.
TEST(two_threads_lose_nothing_that_matters) {
  constexpr std::uint64_t kRequests = 23;
  constexpr std::uint64_t kSteps = 3000;
  for (const std::uint64_t capacity : {2U, 8U, 64U}) {
    Ends ends(capacity);
    std::thread writer([&] {
      for (std::uint64_t step = 1; step <= kSteps; ++step) {
        Messages batch;
        for (std::uint64_t request = step % 3; request < kRequests; request += 1 + step % 5) {
          batch.push_back(message(request, step));
        }
        static_cast<void>(ends.writer.publish(batch));
      }
      Messages last;
      for (std::uint64_t request = 0; request < kRequests; ++request) last.push_back(message(request, kSteps + 1));
      static_cast<void>(ends.writer.publish(last));
      while (ends.writer.publish({}) > 0) std::this_thread::yield();
    });
    std::map<std::uint64_t, std::uint64_t> newest;
    std::uint64_t finished = 0;
    bool in_order = true;
    while (finished < kRequests && !ends.reader.broken()) {
      const Messages found = drain(ends.reader, 5);
      if (found.empty()) std::this_thread::yield();
      for (const Message& one : found) {
        in_order = in_order && whole(one) && newest[one.request] < one.step;
        newest[one.request] = one.step;
        if (one.step == kSteps + 1) ++finished;
      }
    }
    writer.join();
    CHECK(in_order && finished == kRequests && drain(ends.reader).empty());
    CHECK(ends.reader.counters().corrupt == 0 && !ends.reader.broken() && !ends.writer.broken());
    CHECK(ends.writer.counters().published == ends.reader.counters().received);
    CHECK(capacity > 2 || ends.writer.counters().replaced > 0);  // two slots never hold a batch
  }
}

}  // namespace
