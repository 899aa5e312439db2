// Who a process is, and whether it is still there. An id alone says nothing: it is given to another process later.

#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>

#include "nitro/ring_layout.hpp"

namespace nitro {

// Where ids and start times of processes mean something: compare keys of one place only.
struct ProcessPlace {
  std::uint64_t pid_namespace = 0;
  std::uint64_t time_namespace = 0;  // /proc counts start times from its zero; 0 where the kernel has none
  decltype(Header::boot) boot{};     // the kernel's id: sandboxes with kernels of their own can share /dev/shm

  [[nodiscard]] static ProcessPlace of_this_process();  // throws SegmentError without /proc
  bool operator==(const ProcessPlace&) const = default;
};

[[nodiscard]] constexpr ProcessKey process_key(std::uint64_t pid, std::uint64_t start_ticks) noexcept {
  // Linux' ids are below 2^22; 2^42 ticks of 10 ms are 1,394 years.
  return (start_ticks << 22) | (pid & 0x3FFFFF);
}

[[nodiscard]] constexpr pid_t pid_of(ProcessKey key) noexcept { return static_cast<pid_t>(key & 0x3FFFFF); }

[[nodiscard]] ProcessKey key_of_this_process();  // throws SegmentError without /proc

// Whether the process of the key has ended (a zombie has). In doubt it has not.
[[nodiscard]] bool has_ended(ProcessKey key);

}  // namespace nitro
