#include "nitro/collector.hpp"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

namespace nitro {
namespace {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::int32_t checked_num_blocks(std::int64_t num_blocks) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_blocks < 1 || num_blocks > kMax) {
    throw std::invalid_argument(text("num_blocks=", num_blocks, " is outside [1, ", kMax, "]: pass the pool's size"));
  }
  return static_cast<std::int32_t>(num_blocks);
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
  if (reusable.size() != blocks.size()) {
    throw std::invalid_argument(text("reusable has ", reusable.size(), " entries, blocks ", blocks.size(),
                                     ": pass one flag for each block of the table"));
  }
  check_table(request, blocks, physical, keep);
  std::vector<BlockId> dst(blocks_for(keep));
  for (std::size_t i = 0; i < dst.size(); ++i) dst[i] = reusable[i] != 0 ? blocks[i] : kNeedsFresh;
  return dst;
}

std::vector<BlockId> Collector::commit(Handle request, std::span<const BlockId> blocks, std::span<const BlockId> dst,
                                       std::int64_t physical, std::int64_t keep) {
  check_table(request, blocks, physical, keep);
  if (dst.size() != blocks_for(keep)) {
    throw std::invalid_argument(text("dst has ", dst.size(), " blocks, but keep=", keep, " slots of ", block_size_,
                                     " need ", blocks_for(keep), ": pass what plan() returned, filled"));
  }
  // check_table() left its stamp on the table. Stamping dst anew tells three kinds of blocks apart: still with the old
  // stamp (to be freed), with the new one (kept), or with neither (not the request's).
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

  // From here on only allocations can throw, and they all come before the first change.
  std::vector<BlockId> freed;
  freed.reserve(blocks.size());
  for (std::size_t i = blocks.size(); i-- > 0;) {
    if (mark_of(blocks[i]) == in_table) freed.push_back(blocks[i]);
  }
  std::vector<BlockId> owned(dst.begin(), dst.end());
  Account& account = accounts_[request];

  for (const BlockId block : freed) owner_[static_cast<std::size_t>(block)] = kNobody;
  for (const BlockId block : dst) owner_[static_cast<std::size_t>(block)] = request;
  account.blocks = std::move(owned);
  account.kept = keep;
  account.evicted += physical - keep;
  ++account.epoch;
  ++counters_.evictions;
  counters_.tokens_evicted += physical - keep;
  // Every fresh block replaces one of the table that is freed, so the difference in length is the net gain.
  counters_.blocks_freed += static_cast<std::int64_t>(blocks.size() - dst.size());
  check_if_debug();
  return freed;
}

void Collector::adopt(Handle request, std::span<const BlockId> blocks) {
  const auto found = accounts_.find(request);
  if (found == accounts_.end()) return;
  ++stamp_;
  for (const BlockId block : blocks) {
    check_block(request, "adopted", block);
    check_unowned(request, "adopted", block);
    if (!mark(block)) throw IntegrityError(text("request #", request, ": block ", block, " is adopted twice"));
  }
  std::vector<BlockId>& owned = found->second.blocks;
  owned.insert(owned.end(), blocks.begin(), blocks.end());
  for (const BlockId block : blocks) owner_[static_cast<std::size_t>(block)] = request;
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

void Collector::check_integrity() const {
  std::vector<Handle> owner(owner_.size(), kNobody);
  Counters total{.evictions = released_evictions_, .tokens_evicted = released_tokens_, .blocks_freed = 0};
  for (const auto& [request, account] : accounts_) {
    for (const BlockId block : account.blocks) {
      check_block(request, "owned", block);
      Handle& holder = owner[static_cast<std::size_t>(block)];
      if (holder != kNobody) {
        throw IntegrityError(text("block ", block, " is owned by request #", holder, " and by request #", request));
      }
      holder = request;
    }
    if (account.epoch < 1 || account.evicted < account.epoch) {
      throw IntegrityError(text("request #", request, ": ", account.evicted, " tokens evicted in ", account.epoch,
                                " evictions, but each evicts at least one"));
    }
    if (account.kept < 1 || account.blocks.size() < blocks_for(account.kept)) {
      throw IntegrityError(text("request #", request, ": ", account.kept, " slots kept in ", account.blocks.size(),
                                " blocks of ", block_size_));
    }
    total.evictions += account.epoch;
    total.tokens_evicted += account.evicted;
  }
  const auto [left, right] = std::mismatch(owner.begin(), owner.end(), owner_.begin());
  if (left != owner.end()) {
    throw IntegrityError(text("block ", left - owner.begin(), " is booked to request #", *right,
                              " but in the table of request #", *left));
  }
  if (total.evictions != counters_.evictions || total.tokens_evicted != counters_.tokens_evicted) {
    throw IntegrityError(text("the counters say ", counters_.evictions, " evictions of ", counters_.tokens_evicted,
                              " tokens, the requests' histories ", total.evictions, " of ", total.tokens_evicted));
  }
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

void Collector::check_table(Handle request, std::span<const BlockId> blocks, std::int64_t physical,
                            std::int64_t keep) const {
  if (request < 0) throw std::invalid_argument(text("handle ", request, " is negative: handles count from 0"));
  if (keep < 1 || keep >= physical) {
    throw std::invalid_argument(text("keep=", keep, " is outside [1, physical=", physical,
                                     "): an eviction keeps at least one token and drops at least one"));
  }
  if (blocks_for(physical) > blocks.size()) {
    throw IntegrityError(text("request #", request, ": physical=", physical, " slots need ", blocks_for(physical),
                              " blocks of ", block_size_, ", but its table has ", blocks.size()));
  }
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
                              account->blocks.size(), " blocks that the ledger says it owns: adopt() new blocks, and ",
                              "release() preempted and finished requests"));
  }
  if (physical < account->kept) {
    throw IntegrityError(text("request #", request, ": physical=", physical, " slots, but the last eviction left ",
                              account->kept, " and none were dropped since"));
  }
}

void Collector::check_if_debug() const {
#ifndef NDEBUG
  check_integrity();
#endif
}

bool Collector::mark(BlockId block) const {
  std::uint64_t& seen = marks_[static_cast<std::size_t>(block)];
  return std::exchange(seen, stamp_) != stamp_;
}

}  // namespace nitro
