#include "nitro/collector.hpp"

#include <algorithm>
#include <utility>

#include "text.hpp"

namespace nitro {
namespace {

std::int32_t checked_num_blocks(std::int64_t num_blocks) {
  if (num_blocks < 1 || num_blocks > kLastBlock) {
    throw std::invalid_argument(
        text("num_blocks=", num_blocks, " is outside [1, ", kLastBlock, "]: pass the pool's size"));
  }
  return static_cast<std::int32_t>(num_blocks);
}

void check_split(std::size_t requests, std::span<const std::int32_t> counts, std::size_t blocks) {
  if (counts.size() != requests) {
    throw std::invalid_argument(text("counts has ", counts.size(), " entries, but there are ", requests,
                                     " requests: pass the number of each one's blocks"));
  }
  std::size_t sum = 0;
  for (const std::int32_t count : counts) {
    if (count < 0) throw std::invalid_argument(text("a count of blocks is ", count, ": none is the least"));
    sum += static_cast<std::size_t>(count);
  }
  if (sum != blocks) {
    throw std::invalid_argument(text("counts add up to ", sum, ", but there are ", blocks,
                                     " blocks: pass those of one request after the other"));
  }
}

}  // namespace

Collector::Collector(std::int64_t num_blocks, std::int64_t block_size, std::int64_t null_block)
    : num_blocks_(checked_num_blocks(num_blocks)),
      block_size_(block_size),
      null_block_(static_cast<BlockId>(null_block)),
      owner_(static_cast<std::size_t>(num_blocks), kNobody),
      marks_(static_cast<std::size_t>(num_blocks), 0) {
  if (block_size < 1) {
    throw std::invalid_argument(text("block_size=", block_size, " is below 1: pass the tokens that a block holds"));
  }
  if (null_block < 0 || null_block >= num_blocks) {
    throw std::invalid_argument(
        text("null_block=", null_block, " is outside [0, num_blocks=", num_blocks, "): pass the pool's null block"));
  }
}

std::vector<BlockId> Collector::plan(Handle request, std::span<const BlockId> blocks,
                                     std::span<const std::uint8_t> reusable, std::int64_t physical,
                                     std::int64_t keep) const {
  check_table(request, blocks, physical, keep);
  if (reusable.size() < blocks_for(keep)) {
    throw std::invalid_argument(text("reusable has ", reusable.size(), " entries, but keep=", keep, " slots of ",
                                     block_size_, " need ", blocks_for(keep),
                                     " blocks: pass one flag for each of the table's first blocks"));
  }
  std::vector<BlockId> dst(blocks_for(keep));
  for (std::size_t i = 0; i < dst.size(); ++i) dst[i] = reusable[i] != 0 ? blocks[i] : kNeedsFresh;
  return dst;
}

Committed Collector::commit_all(std::span<const Eviction> evictions) {
  for (const Eviction& eviction : evictions) {
    eviction.in_place ? check_in_place(eviction) : check_move(eviction);
  }
  check_together(evictions);

  // From here on only allocations can throw, and they all come before the first change.
  Committed done = outcome(evictions);
  std::vector<std::vector<BlockId>> owned;  // of those that are not in place, in order
  std::unordered_map<Handle, Account> newcomers;
  for (const Eviction& eviction : evictions) {
    if (eviction.in_place) continue;
    owned.emplace_back(eviction.dst.begin(), eviction.dst.end());
    if (find(eviction.request) == nullptr) newcomers.try_emplace(eviction.request);
  }
  accounts_.reserve(accounts_.size() + newcomers.size());
  accounts_.merge(newcomers);

  // All blocks are given up before any is booked: requests that enter together may have shared some.
  for (const BlockId block : done.freed) owner_[static_cast<std::size_t>(block)] = kNobody;
  auto next = owned.begin();
  for (const Eviction& eviction : evictions) {
    Account& account = accounts_.find(eviction.request)->second;
    const std::size_t count = eviction.in_place ? account.blocks.size() : eviction.blocks.size();
    if (eviction.in_place) {
      account.blocks.resize(blocks_for(eviction.keep));
    } else {
      account.blocks = std::move(*next++);
      for (const BlockId block : account.blocks) owner_[static_cast<std::size_t>(block)] = eviction.request;
    }
    account.kept = eviction.keep;
    account.evicted += eviction.physical - eviction.keep;
    ++account.epoch;
    ++counters_.evictions;
    counters_.tokens_evicted += eviction.physical - eviction.keep;
    // Every fresh block replaces one of the table that is freed, so the difference in length is the net gain.
    counters_.blocks_freed += static_cast<std::int64_t>(count - account.blocks.size());
  }
  check_if_debug();
  return done;
}

void Collector::adopt_all(std::span<const Handle> requests, std::span<const std::int32_t> counts,
                          std::span<const BlockId> blocks) {
  struct Adoption {
    Handle request;
    Account* account;
    std::span<const BlockId> blocks;
  };
  check_split(requests.size(), counts, blocks.size());
  std::vector<Adoption> adoptions;
  std::size_t first = 0;
  const std::uint64_t batch = ++stamp_;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::span<const BlockId> own = blocks.subspan(first, static_cast<std::size_t>(counts[i]));
    first += own.size();
    const auto found = accounts_.find(requests[i]);
    if (found == accounts_.end()) continue;
    Account& account = found->second;
    adoptions.push_back({requests[i], &account, own});
    if (std::exchange(account.batch, batch) != batch) account.incoming = 0;
    account.incoming += own.size();
    for (const BlockId block : own) {
      check_block(requests[i], "adopted", block);
      // Neighbours in the batch are not neighbours in the pool.
      __builtin_prefetch(&owner_[static_cast<std::size_t>(block)], 1);
      __builtin_prefetch(&marks_[static_cast<std::size_t>(block)], 1);
    }
  }
  for (const Adoption& adoption : adoptions) {
    for (const BlockId block : adoption.blocks) {
      check_unowned(adoption.request, "adopted", block);
      if (!mark(block)) {
        throw IntegrityError(text("request #", adoption.request, ": block ", block, " is adopted twice"));
      }
    }
  }
  // The last that can throw, before the first change. A vector reserves what it is told, so that it is told to double.
  for (const Adoption& adoption : adoptions) {
    std::vector<BlockId>& owned = adoption.account->blocks;
    const std::size_t needed = owned.size() + adoption.account->incoming;
    if (needed > owned.capacity()) owned.reserve(std::max(needed, 2 * owned.capacity()));
  }
  for (const Adoption& adoption : adoptions) {
    std::vector<BlockId>& owned = adoption.account->blocks;
    owned.insert(owned.end(), adoption.blocks.begin(), adoption.blocks.end());
    for (const BlockId block : adoption.blocks) owner_[static_cast<std::size_t>(block)] = adoption.request;
  }
  check_if_debug();
}

std::int64_t Collector::release(Handle request) {
  const auto found = accounts_.find(request);
  if (found == accounts_.end()) return 0;
  const Account& account = found->second;
  const std::int64_t evicted = account.evicted;
  for (const BlockId block : account.blocks) owner_[static_cast<std::size_t>(block)] = kNobody;
  released_evictions_ += account.epoch;
  released_tokens_ += evicted;
  accounts_.erase(found);
  check_if_debug();
  return evicted;
}

std::int64_t Collector::evicted(Handle request) const {
  const Account* account = find(request);
  return account == nullptr ? 0 : account->evicted;
}

std::int64_t Collector::epoch(Handle request) const {
  const Account* account = find(request);
  return account == nullptr ? 0 : account->epoch;
}

std::vector<BlockId> Collector::owned(Handle request) const {
  const Account* account = find(request);
  return account == nullptr ? std::vector<BlockId>{} : account->blocks;
}

Handle Collector::owner(BlockId block) const {
  if (block < 0 || block >= num_blocks_) {
    throw std::invalid_argument(text("block ", block, " is outside [0, ", num_blocks_, ")"));
  }
  return owner_[static_cast<std::size_t>(block)];
}

std::size_t Collector::blocks_for(std::int64_t slots) const noexcept {
  return static_cast<std::size_t>((slots - 1) / block_size_ + 1);  // slots >= 1; cannot overflow
}

const Collector::Account* Collector::find(Handle request) const {
  const auto found = accounts_.find(request);
  return found == accounts_.end() ? nullptr : &found->second;
}

void Collector::check_block(Handle request, std::string_view role, BlockId block) const {
  if (block < 0 || block >= num_blocks_) {
    throw IntegrityError(
        text("request #", request, ": ", role, " block ", block, " is outside [0, ", num_blocks_, ")"));
  }
  if (block == null_block_) {
    throw IntegrityError(text("request #", request, ": ", role, " block ", block, " is the null block"));
  }
}

void Collector::check_unowned(Handle request, std::string_view role, BlockId block) const {
  const Handle holder = owner_[static_cast<std::size_t>(block)];
  if (holder != kNobody) {
    throw IntegrityError(
        text("request #", request, ": ", role, " block ", block, " already belongs to request #", holder));
  }
}

void Collector::check_lengths(Handle request, std::size_t count, std::int64_t physical, std::int64_t keep) const {
  if (request < 0) throw std::invalid_argument(text("handle ", request, " is negative: handles count from 0"));
  if (keep < 1 || keep >= physical) {
    throw std::invalid_argument(text("keep=", keep, " is outside [1, physical=", physical,
                                     "): an eviction keeps at least one token and drops at least one"));
  }
  if (blocks_for(physical) > count) {
    throw IntegrityError(text("request #", request, ": physical=", physical, " slots need ", blocks_for(physical),
                              " blocks of ", block_size_, ", but its table has ", count));
  }
}

void Collector::check_grown(Handle request, const Account& account, std::int64_t physical) const {
  if (physical < account.kept) {
    throw IntegrityError(text("request #", request, ": physical=", physical, " slots, but the last eviction left ",
                              account.kept, " and none were dropped since"));
  }
}

void Collector::check_table(Handle request, std::span<const BlockId> blocks, std::int64_t physical,
                            std::int64_t keep) const {
  check_lengths(request, blocks.size(), physical, keep);
  ++stamp_;
  for (const BlockId block : blocks) {
    check_block(request, "table", block);
    if (!mark(block)) throw IntegrityError(text("request #", request, ": block ", block, " is in its table twice"));
  }
  const Account* account = find(request);
  if (account == nullptr) {
    for (const BlockId block : blocks) check_unowned(request, "table", block);
    return;
  }
  if (!std::equal(blocks.begin(), blocks.end(), account->blocks.begin(), account->blocks.end())) {
    throw IntegrityError(text("request #", request, ": its table of ", blocks.size(), " blocks is not the ",
                              account->blocks.size(),
                              " blocks that the ledger says it owns: adopt_all() new blocks, and ",
                              "release() preempted and finished requests"));
  }
  check_grown(request, *account, physical);
}

void Collector::check_in_place(const Eviction& eviction) const {
  const Handle request = eviction.request;
  const Account* account = find(request);
  if (account == nullptr) {
    throw IntegrityError(text("request #", request, ": its first eviction cannot be in place: pass its table, and ",
                              "what plan() returned, filled"));
  }
  const std::vector<BlockId>& owned = account->blocks;
  if (eviction.count < 0 || static_cast<std::size_t>(eviction.count) != owned.size() ||
      eviction.first != owned.front() || eviction.last != owned.back()) {
    throw IntegrityError(text("request #", request, ": its table of ", eviction.count, " blocks, ", eviction.first,
                              " to ", eviction.last, ", is not the ", owned.size(), " blocks, ", owned.front(), " to ",
                              owned.back(), ", that the ledger says it owns: adopt_all() new blocks, and release() ",
                              "preempted and finished requests"));
  }
  check_lengths(request, owned.size(), eviction.physical, eviction.keep);
  check_grown(request, *account, eviction.physical);
}

void Collector::check_move(const Eviction& eviction) const {
  const Handle request = eviction.request;
  const std::span<const BlockId> blocks = eviction.blocks;
  const std::span<const BlockId> dst = eviction.dst;
  check_table(request, blocks, eviction.physical, eviction.keep);
  if (dst.size() != blocks_for(eviction.keep)) {
    throw std::invalid_argument(text("dst has ", dst.size(), " blocks, but keep=", eviction.keep, " slots of ",
                                     block_size_, " need ", blocks_for(eviction.keep),
                                     ": pass what plan() returned, filled"));
  }
  // check_table() left its stamp on the table.
  const std::uint64_t in_table = stamp_++;
  for (std::size_t i = 0; i < dst.size(); ++i) {
    check_block(request, "destination", dst[i]);
    if (dst[i] != blocks[i]) {
      if (mark_of(dst[i]) == in_table) {
        throw IntegrityError(text("request #", request, ": destination ", i, " is block ", dst[i],
                                  ", which is another block of the same table, where survivors are read from"));
      }
      check_unowned(request, "fresh", dst[i]);
    }
    if (!mark(dst[i])) throw IntegrityError(text("request #", request, ": block ", dst[i], " is in dst twice"));
  }
}

// What each eviction's own checks cannot see. Blocks of evictions in place are owned, so that nobody else can name
// them.
void Collector::check_together(std::span<const Eviction> evictions) const {
  if (evictions.size() < 2) return;
  std::vector<Handle> requests;
  requests.reserve(evictions.size());
  for (const Eviction& eviction : evictions) requests.push_back(eviction.request);
  std::sort(requests.begin(), requests.end());
  const auto twice = std::adjacent_find(requests.begin(), requests.end());
  if (twice != requests.end()) throw IntegrityError(text("request #", *twice, " is evicted from twice in one step"));

  const std::uint64_t in_table = ++stamp_;
  for (const Eviction& eviction : evictions) {
    for (const BlockId block : eviction.blocks) static_cast<void>(mark(block));
  }
  ++stamp_;
  for (const Eviction& eviction : evictions) {
    for (std::size_t i = 0; i < eviction.dst.size(); ++i) {
      const BlockId block = eviction.dst[i];
      if (block != eviction.blocks[i] && mark_of(block) == in_table) {
        throw IntegrityError(text("request #", eviction.request, ": fresh block ", block,
                                  " is in the table of another request of the same step, where it is read"));
      }
      if (!mark(block)) {
        throw IntegrityError(
            text("request #", eviction.request, ": block ", block, " is a destination of two requests of one step"));
      }
    }
  }
}

Committed Collector::outcome(std::span<const Eviction> evictions) const {
  Committed done;
  for (const Eviction& eviction : evictions) {
    const Account* account = find(eviction.request);
    const std::span<const BlockId> table = eviction.in_place ? account->blocks : eviction.blocks;
    const auto kept = [&](std::size_t i) {
      return i < blocks_for(eviction.keep) && (eviction.in_place || eviction.dst[i] == table[i]);
    };
    done.epochs.push_back(account == nullptr ? 0 : static_cast<std::int32_t>(account->epoch));
    for (std::size_t i = 0; i < eviction.dst.size(); ++i) {
      if (kept(i)) continue;
      done.moved.push_back(static_cast<std::int32_t>(done.src.size() + i));
      done.moved_to.push_back(eviction.dst[i]);
    }
    const std::size_t used = blocks_for(eviction.physical);
    done.src.insert(done.src.end(), table.begin(), table.begin() + static_cast<std::ptrdiff_t>(used));
    for (std::size_t i = table.size(); i-- > 0;) {
      if (kept(i)) continue;
      done.freed.push_back(table[i]);
      // Owners lie far apart, and are written once all evictions have been looked at.
      __builtin_prefetch(&owner_[static_cast<std::size_t>(table[i])], 1);
    }
  }
  return done;
}

bool Collector::mark(BlockId block) const {
  std::uint64_t& seen = marks_[static_cast<std::size_t>(block)];
  return std::exchange(seen, stamp_) != stamp_;
}

}  // namespace nitro
