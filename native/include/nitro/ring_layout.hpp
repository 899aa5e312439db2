// What lies in a segment of shared memory: one header, then the ring's records. docs/bridge.md has it as a table.
//
// Both sides run the same Nitro, as a rule. What they check when they open a segment is here so that another one is
// refused instead of misread: magic, version, byte order and sizes. Bytes 0 to 127 stay as they are in all versions,
// since a later Nitro must be able to tell whether the owner of an older segment is gone.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace nitro {

// One request's count, as a worker found it. What the scheduler needs to use it, or to see that it is too late:
struct Message {
  std::uint64_t request;      // the scheduler's number of the request, never used again for another one
  std::uint64_t step;         // engine step whose cache was scored: how old the answer is
  std::uint32_t run;          // times that the request had been started again: epochs begin anew with each
  std::uint32_t epoch;        // evictions applied in this run before the step; another one since makes it stale
  std::int32_t logical_len;   // tokens computed before the step; those that came later are beyond the count
  std::int32_t physical_len;  // slots that were scored; logical - physical must be what the scheduler has evicted
  std::int32_t keep;          // of these slots, how many would stay
  std::uint32_t flags;        // none is defined in this version: 0

  bool operator==(const Message&) const = default;
};

struct Record {
  Message message;
  std::uint64_t reserved;  // 0
  std::uint64_t sequence;  // its place in the stream since the ring was made
  std::uint64_t checksum;  // of all before it, and of the ring's seed
};

// A process by its id and the time when it started, since ids are used again. In one word, so that one atomic exchange
// can claim a ring in its name; 0 is nobody.
using ProcessKey = std::uint64_t;

inline constexpr std::uint64_t kMagic =
    std::bit_cast<std::uint64_t>(std::array<char, 8>{'N', 'I', 'T', 'R', 'O', 'S', 'H', 'M'});
inline constexpr std::uint32_t kLayoutVersion = 1;
inline constexpr std::uint32_t kByteOrder = 0x01020304;

// Twice the usual cache line: processors fetch lines in pairs, and some have lines of this size.
inline constexpr std::size_t kLine = 128;

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free, "a lock would lie in one process and not in the other");
static_assert(sizeof(Counter) == 8 && alignof(Counter) == 8);

struct Header {
  // Written once by the owner, magic last: who sees the magic sees all of these.
  Counter magic;
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t header_size;
  std::uint32_t record_size;
  std::uint64_t capacity;  // records; a power of two
  std::uint64_t engine;    // random id of the engine
  std::uint32_t rank;
  std::uint32_t unused;
  ProcessKey owner;
  std::uint64_t pid_namespace;   // where the owner's id and
  std::uint64_t time_namespace;  // start time mean something
  std::array<char, 48> boot;     // the kernel that they are of, as text

  alignas(kLine) Counter head;      // records written; the producer's alone
  alignas(kLine) Counter tail;      // records read; the consumer's alone
  alignas(kLine) Counter producer;  // ProcessKey of who writes
};

static_assert(std::is_standard_layout_v<Header> && std::is_trivially_copyable_v<Record>);
static_assert(sizeof(Message) == 40 && sizeof(Record) == 64);
static_assert(offsetof(Record, reserved) == 40 && offsetof(Record, sequence) == 48 && offsetof(Record, checksum) == 56);
static_assert(offsetof(Message, request) == 0 && offsetof(Message, step) == 8 && offsetof(Message, run) == 16 &&
              offsetof(Message, epoch) == 20 && offsetof(Message, logical_len) == 24 &&
              offsetof(Message, physical_len) == 28 && offsetof(Message, keep) == 32 && offsetof(Message, flags) == 36);
static_assert(offsetof(Header, magic) == 0 && offsetof(Header, version) == 8 && offsetof(Header, byte_order) == 12 &&
              offsetof(Header, header_size) == 16 && offsetof(Header, record_size) == 20 &&
              offsetof(Header, capacity) == 24 && offsetof(Header, engine) == 32 && offsetof(Header, rank) == 40 &&
              offsetof(Header, owner) == 48 && offsetof(Header, pid_namespace) == 56 &&
              offsetof(Header, time_namespace) == 64 && offsetof(Header, boot) == 72);
static_assert(offsetof(Header, head) == 128 && offsetof(Header, tail) == 256 && offsetof(Header, producer) == 384);
static_assert(sizeof(Header) == 512 && alignof(Header) == kLine);

// Each of its steps can be undone, so that records which differ in one word never have the same checksum; for others
// it is a matter of 1 in 2^64.
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t sum, std::uint64_t word) noexcept {
  sum = (sum ^ word) * 0x9E3779B97F4A7C15ULL;
  return sum ^ (sum >> 29);
}

// What the checksums of one ring start from, so that no other ring's records count as its own.
[[nodiscard]] constexpr std::uint64_t seed_of(std::uint64_t engine, std::uint32_t rank) noexcept {
  return mixed(mixed(kMagic, engine), rank);
}

[[nodiscard]] constexpr std::uint64_t checksum_of(const Record& record, std::uint64_t seed) noexcept {
  const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(Record) / 8>>(record);
  std::uint64_t sum = seed;
  for (std::size_t i = 0; i + 1 < words.size(); ++i) sum = mixed(sum, words[i]);
  return sum;
}

}  // namespace nitro
