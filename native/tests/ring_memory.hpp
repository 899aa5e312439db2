// Memory of one ring, without a segment around it, and messages to send through it.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nitro/ring.hpp"

namespace ring_memory {

struct Memory {
  explicit Memory(std::uint64_t capacity, std::uint64_t engine = 77) : slots(capacity) {
    header.capacity = capacity;
    header.engine = engine;
  }
  nitro::Header header{};
  std::vector<nitro::Record> slots;
};

// The other fields follow from these two, so that a mixture of two messages is seen.
inline nitro::Message message(std::uint64_t request, std::uint64_t step) {
  const auto length = static_cast<std::int32_t>((request * 31 + step) % 1000);
  return {.request = request,
          .step = step,
          .run = static_cast<std::uint32_t>(step / 7),
          .epoch = static_cast<std::uint32_t>(step % 7),
          .logical_len = length + 20,
          .physical_len = length + 10,
          .keep = length,
          .flags = 0};
}

inline bool whole(const nitro::Message& found) { return found == message(found.request, found.step); }

inline std::vector<nitro::Message> drain(nitro::RingReader& reader, std::size_t most = 1000) {
  std::vector<nitro::Message> found(most);
  found.resize(reader.take(found));
  return found;
}

}  // namespace ring_memory
