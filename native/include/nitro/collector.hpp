// The ledger of the KV-cache blocks of requests that have had evictions.
//
// A request enters the ledger with its first eviction. From then on all of its blocks are private: nobody else reads
// them and they are never published to the prefix cache, so the ledger can tell for each block who owns it. Requests
// without evictions are the engine's business alone.
//
// One caller at a time: an instance holds no lock (its only user is the scheduler, under Python's GIL). Distinct
// instances share nothing.

#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace nitro {

using BlockId = std::int32_t;
using Handle = std::int32_t;  // a request; chosen by the caller, >= 0, reusable after release()

inline constexpr BlockId kLastBlock = std::numeric_limits<BlockId>::max();
inline constexpr BlockId kNeedsFresh = -1;  // in a destination list: the caller must put a fresh block here
inline constexpr Handle kNobody = -1;

// The ledger and its caller disagree, or the ledger contradicts itself: a bug, never the user's fault. In messages a
// request appears as "#<handle>", so that the caller can put its own name there.
class IntegrityError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Totals since construction.
struct Counters {
  std::int64_t evictions = 0;
  std::int64_t tokens_evicted = 0;  // once per request, not per layer or head
  std::int64_t blocks_freed = 0;    // net of the fresh blocks that evictions took

  bool operator==(const Counters&) const = default;
};

// One request's eviction among those of an engine step.
struct Eviction {
  Handle request = 0;
  std::int64_t physical = 0;  // slots in use before it
  std::int64_t keep = 0;      // slots in use after it

  // Where the survivors go. In place: into the first blocks that the ledger has for the request, which must have been
  // evicted before; the engine's table is compared by its length and its ends alone, so that a step need not list the
  // blocks of everybody. Else: from the table `blocks` to `dst`, which is what plan() returned, filled.
  bool in_place = false;
  std::int64_t count = 0;  // in place: blocks in the engine's table
  BlockId first = 0;       // in place: the first of them
  BlockId last = 0;        // in place: the last of them
  std::span<const BlockId> blocks;
  std::span<const BlockId> dst;
};

// What commit_all() did. Lists of blocks hold one request after the other, in the order of the evictions.
struct Committed {
  std::vector<std::int32_t> epochs;  // evictions that each request had had before
  std::vector<BlockId> src;          // the first ceil(physical / block_size) blocks of each table before
  std::vector<std::int32_t> moved;   // where in src a destination is not the block itself...
  std::vector<BlockId> moved_to;     // ...and what it is there
  std::vector<BlockId> freed;        // to give back in this order: the end of each table first, as vLLM does, so that
                                     // a prefix outlives its continuations
};

// Every call takes time linear in the lengths of its arguments, and has the strong guarantee: it throws before it
// changes anything. In builds without NDEBUG, each call that changes the ledger ends with check_integrity().
class Collector {
 public:
  // Block ids are in [0, num_blocks); null_block is never owned. Throws std::invalid_argument.
  Collector(std::int64_t num_blocks, std::int64_t block_size, std::int64_t null_block);

  // Where the survivors of an eviction go: ceil(keep / block_size) blocks. The request's own block where reusable[i]
  // is not 0 (nobody else reads or may find it), else kNeedsFresh.
  //
  // blocks: the request's block table; reusable: a flag for each of its first ceil(keep / block_size) blocks, or for
  // more; physical: slots in use before the eviction; keep: slots in use after it.
  // Throws std::invalid_argument for lengths that no eviction has, IntegrityError if the table contradicts the ledger.
  [[nodiscard]] std::vector<BlockId> plan(Handle request, std::span<const BlockId> blocks,
                                          std::span<const std::uint8_t> reusable, std::int64_t physical,
                                          std::int64_t keep) const;

  // Records the evictions of one step, all of them or, if one is wrong, none. Each request occurs once. Afterwards its
  // destinations are what it owns. A destination that is not in its own table must be held by nobody: neither owned,
  // nor a destination of another eviction, nor in the table of another one, which is read until the step is over.
  [[nodiscard]] Committed commit_all(std::span<const Eviction> evictions);

  // Appends the blocks that the pool gave to requests of the ledger in one step, all of them or, if one is wrong, none;
  // what it gave to other requests is not looked at. A request may occur several times.
  //
  // counts: for each request, how many blocks; blocks: those of one request after the other.
  // Throws std::invalid_argument if these do not fit each other; IntegrityError if a block is the null block, out of
  // range, named twice, or owned already.
  void adopt_all(std::span<const Handle> requests, std::span<const std::int32_t> counts,
                 std::span<const BlockId> blocks);

  // Forgets a request (finished, aborted or preempted). Returns its evicted tokens, 0 for a request not in the ledger.
  std::int64_t release(Handle request);

  [[nodiscard]] std::int64_t evicted(Handle request) const;  // tokens; 0 if unknown
  [[nodiscard]] std::int64_t epoch(Handle request) const;    // evictions since the request (re)started; 0 if unknown
  [[nodiscard]] std::vector<BlockId> owned(Handle request) const;  // in block-table order; empty if unknown
  [[nodiscard]] Handle owner(BlockId block) const;                 // kNobody if free, shared or not in the ledger
  [[nodiscard]] std::size_t size() const noexcept { return accounts_.size(); }
  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }

  // Proves that owners and owned blocks agree, no block has two owners, the null block has none, no epoch has fallen
  // since the last proof, and the counters are the sum of the requests' histories. O(num_blocks). Throws
  // IntegrityError.
  void check_integrity() const;

  // Proves that, and that the pool agrees: each block is once among the free ones, or once among the live ones (which
  // somebody refers to), or the null block; and no free block has an owner. The ledger does not mirror the pool, which
  // also serves requests that it does not know, so both sets are passed in. O(num_blocks). Throws IntegrityError.
  void check_pool(std::span<const BlockId> free, std::span<const BlockId> live) const;

 private:
  friend struct CollectorProbe;  // with it the tests plant faults that check_integrity() must find

  struct Account {
    std::vector<BlockId> blocks;
    std::int64_t kept = 0;  // slots left by the last eviction; a request never holds fewer
    std::int64_t evicted = 0;
    std::int64_t epoch = 0;
    mutable std::int64_t epoch_proven = 0;  // at the last check_integrity()
    std::uint64_t batch = 0;                // the stamp of the adopt_all() that it was last in,
    std::size_t incoming = 0;               // and how many blocks that one brings
  };

  [[nodiscard]] std::size_t blocks_for(std::int64_t slots) const noexcept;
  [[nodiscard]] const Account* find(Handle request) const;
  void check_block(Handle request, std::string_view role, BlockId block) const;
  void check_unowned(Handle request, std::string_view role, BlockId block) const;
  void check_lengths(Handle request, std::size_t count, std::int64_t physical, std::int64_t keep) const;
  void check_grown(Handle request, const Account& account, std::int64_t physical) const;
  void check_table(Handle request, std::span<const BlockId> blocks, std::int64_t physical, std::int64_t keep) const;
  void check_in_place(const Eviction& eviction) const;
  void check_move(const Eviction& eviction) const;
  void check_together(std::span<const Eviction> evictions) const;
  [[nodiscard]] Committed outcome(std::span<const Eviction> evictions) const;
  void check_if_debug() const;

  // Membership in O(1): a block is in the set made last if its mark is the current stamp.
  [[nodiscard]] bool mark(BlockId block) const;
  [[nodiscard]] std::uint64_t mark_of(BlockId block) const { return marks_[static_cast<std::size_t>(block)]; }

  std::int32_t num_blocks_;
  std::int64_t block_size_;
  BlockId null_block_;
  std::vector<Handle> owner_;  // by block id
  std::unordered_map<Handle, Account> accounts_;
  Counters counters_;
  std::int64_t released_evictions_ = 0;  // of requests that have left the ledger
  std::int64_t released_tokens_ = 0;
  mutable std::vector<std::uint64_t> marks_;  // scratch, by block id
  mutable std::uint64_t stamp_ = 0;
};

}  // namespace nitro
