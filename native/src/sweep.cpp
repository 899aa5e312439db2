#include "nitro/sweep.hpp"

#include <bit>
#include <cstddef>
#include <stdexcept>

#include "text.hpp"

namespace nitro {
namespace {

enum class State : std::uint8_t { kDead, kLive, kReturned };

// A set of blocks with a state each: open addressing with linear probing, at most half full, so that a look-up takes a
// constant number of probes in expectation.
class BlockStates {
 public:
  explicit BlockStates(std::size_t most)
      : entries_(std::bit_ceil(2 * most + 1)), shift_(64 - std::countr_zero(entries_.size())) {}

  void insert(BlockId block) {
    Entry& entry = entries_[place(block)];
    if (entry.block != block) entry = {block, State::kDead};
  }

  // nullptr if the block is not in the set.
  [[nodiscard]] State* find(BlockId block) {
    Entry& entry = entries_[place(block)];
    return entry.block == block ? &entry.state : nullptr;
  }

 private:
  static constexpr BlockId kEmpty = -1;

  struct Entry {
    BlockId block = kEmpty;
    State state = State::kDead;
  };

  // Where a block is, or would go. Multiplying by 2^64 over the golden ratio spreads runs of ids, which are the rule.
  [[nodiscard]] std::size_t place(BlockId block) const {
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
    // The set holds two entries at least, so that the shift is below 64.
    std::size_t at = static_cast<std::size_t>((static_cast<std::uint64_t>(block) * kGolden) >> shift_);
    while (entries_[at].block != kEmpty && entries_[at].block != block) at = (at + 1) & (entries_.size() - 1);
    return at;
  }

  std::vector<Entry> entries_;
  int shift_;
};

}  // namespace

std::vector<BlockId> dead_blocks(std::span<const BlockId> blocks, std::span<const std::int64_t> live,
                                 std::int64_t block_size) {
  if (block_size < 1) {
    throw std::invalid_argument(text("block_size=", block_size, " is below 1: pass the tokens that a block holds"));
  }
  BlockStates states(blocks.size() + 1);
  for (const BlockId block : blocks) {
    if (block < 0) throw std::invalid_argument(text("block ", block, " is negative: block ids count from 0"));
    states.insert(block);
  }
  std::int64_t begin = 0;  // of the block that was marked last: slots of a block usually come together
  std::int64_t width = 0;
  for (const std::int64_t slot : live) {
    if (slot >= begin && slot - begin < width) continue;  // the block's end might be beyond int64
    const std::int64_t block = slot / block_size;
    State* state = slot < 0 || block > kLastBlock ? nullptr : states.find(static_cast<BlockId>(block));
    if (state == nullptr) {
      throw IntegrityError(text("slot ", slot, " is live, but its block ", block, " is none of the ", blocks.size(),
                                " blocks that are held"));
    }
    *state = State::kLive;
    begin = block * block_size;
    width = block_size;
  }
  std::vector<BlockId> dead;
  for (const BlockId block : blocks) {
    State* state = states.find(block);
    // Without the GIL somebody may write to the array meanwhile; what he gets is wrong, but nothing else happens.
    if (state == nullptr || *state != State::kDead) continue;
    *state = State::kReturned;
    dead.push_back(block);
  }
  return dead;
}

}  // namespace nitro
