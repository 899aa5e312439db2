// The life of a segment of shared memory that holds one ring.
//
// The reader's process (the scheduler's) makes it and owns it: it is one process for all workers, there before the
// first message, and what it asks for is what it gets. A worker opens it by the name that it is given. The owner
// removes the name; memory lives on until the last mapping is gone. A name that is left behind by a killed owner is
// removed by the next engine of the same user, which must never happen to an owner that lives:
//
//   - the owner holds a lock (flock) on the file as long as it lives. The kernel lets go of it however the owner ends,
//   and
//     it is the same lock from all containers that share the memory;
//   - and where ids of processes mean the same, the owner's process must have ended, too.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "nitro/ring_layout.hpp"

namespace nitro {

inline constexpr const char* kSharedMemory = "/dev/shm";  // where shm_open() has its files
inline constexpr std::uint64_t kLeastCapacity = 2;
inline constexpr std::uint64_t kMostCapacity = 1ULL << 20;

// Shared memory is missing, full or not ours, or a segment is not what it should be. The message has the path and the
// remedy.
class SegmentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Names a segment: nitro-<uid>-<engine as 16 hexadecimal digits>-<rank>.
[[nodiscard]] std::string segment_name(std::uint64_t engine, std::uint32_t rank);

class Segment {
 public:
  // Makes a segment that nobody but this user can open, and owns it. capacity: records, a power of two in
  // [kLeastCapacity, kMostCapacity], or std::invalid_argument. All its memory is there afterwards: no later access can
  // fail for want of memory. Throws SegmentError.
  [[nodiscard]] static Segment create(std::uint64_t engine, std::uint32_t rank, std::uint64_t capacity);

  // Opens a segment and claims its ring's writing end, which is free or was left behind by a process that has ended.
  // Throws SegmentError.
  [[nodiscard]] static Segment attach(const std::string& name);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();  // as the owner, removes the name; else, gives up the claim

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] Header& header() const noexcept { return *header_; }
  [[nodiscard]] std::span<Record> records() const noexcept;

  // Removes the name (owner only), if it is still there. The ring goes on; nobody can open it any more.
  void unlink() noexcept;

  // Throws SegmentError in a process that was forked from the one which opened the segment: it shares the memory,
  // and two writers or readers would ruin the ring.
  void check_process() const;

 private:
  Segment(std::string name, int file, bool owner);
  void map(int file, std::size_t size);

  std::string name_;
  int file_;    // kept open by the owner, for its lock
  bool owner_;  // of the name, until it has removed it
  bool claimed_ = false;
  pid_t pid_;
  std::size_t size_ = 0;
  std::uint64_t capacity_ = 0;
  Header* header_ = nullptr;
};

// Removes the segment of this name if it is one of this user whose owner has ended; returns whether it did. Whatever is
// in doubt stays.
bool remove_if_stale(const std::string& name);

}  // namespace nitro
