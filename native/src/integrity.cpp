// What the ledger can prove of itself, and of itself and the pool together.

#include <algorithm>
#include <cstddef>

#include "nitro/collector.hpp"
#include "text.hpp"

namespace nitro {

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
    if (account.epoch < account.epoch_proven) {
      throw IntegrityError(text("request #", request, ": epoch ", account.epoch, " comes after epoch ",
                                account.epoch_proven, ": epochs never fall"));
    }
    account.epoch_proven = account.epoch;
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

void Collector::check_pool(std::span<const BlockId> free, std::span<const BlockId> live) const {
  enum class Place : std::uint8_t { kNowhere, kFree, kLive };
  std::vector<Place> places(owner_.size(), Place::kNowhere);
  const auto put = [&](std::span<const BlockId> blocks, Place place, const char* name) {
    for (const BlockId block : blocks) {
      if (block < 0 || block >= num_blocks_) {
        throw IntegrityError(text(name, " block ", block, " is outside [0, ", num_blocks_, ")"));
      }
      if (block == null_block_) throw IntegrityError(text(name, " block ", block, " is the null block"));
      Place& at = places[static_cast<std::size_t>(block)];
      if (at == place) throw IntegrityError(text("block ", block, " is ", name, " twice"));
      if (at != Place::kNowhere) throw IntegrityError(text("block ", block, " is free and live at once"));
      at = place;
    }
  };
  put(free, Place::kFree, "free");
  put(live, Place::kLive, "live");
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i] == Place::kFree && owner_[i] != kNobody) {
      throw IntegrityError(text("block ", i, " is free, but request #", owner_[i], " owns it"));
    }
    if (places[i] == Place::kNowhere && static_cast<BlockId>(i) != null_block_) {
      throw IntegrityError(text(free.size(), " free + ", live.size(), " live + 1 null blocks are not the pool's ",
                                num_blocks_, ": block ", i, " is lost"));
    }
  }
  check_integrity();
}

void Collector::check_if_debug() const {
#ifndef NDEBUG
  check_integrity();
#endif
}

}  // namespace nitro
