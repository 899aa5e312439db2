// The sweep: its rules one by one, then beside the two nested loops that define it.

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "nitro/sweep.hpp"

namespace {

using nitro::BlockId;
using nitro::dead_blocks;
using nitro::IntegrityError;
using Blocks = std::vector<BlockId>;
using Slots = std::vector<std::int64_t>;

TEST(blocks_without_a_live_slot_are_returned_in_order) {
  CHECK((dead_blocks(Blocks{7, 3, 9, 1}, Slots{12, 15, 7}, 4) == Blocks{7, 9}));
  CHECK((dead_blocks(Blocks{7, 3}, Slots{}, 4) == Blocks{7, 3}));
  CHECK(dead_blocks(Blocks{7, 3}, Slots{31, 12}, 4).empty());
  CHECK(dead_blocks(Blocks{}, Slots{}, 4).empty());
  CHECK((dead_blocks(Blocks{2, 1, 0}, Slots{1}, 1) == Blocks{2, 0}));
}

TEST(a_block_is_returned_once_whoever_holds_it) {
  CHECK((dead_blocks(Blocks{5, 6, 5, 6, 5}, Slots{24, 24, 27}, 4) == Blocks{5}));
}

TEST(first_and_last_slots_belong_to_their_block) {
  for (const std::int64_t slot : {32, 33, 47}) CHECK((dead_blocks(Blocks{1, 2, 3}, Slots{slot}, 16) == Blocks{1, 3}));
}

TEST(the_largest_ids_fit) {
  constexpr BlockId kLast = std::numeric_limits<BlockId>::max();
  constexpr std::int64_t kSlot = std::int64_t{kLast} * 16 + 15;
  CHECK((dead_blocks(Blocks{kLast, kLast - 1}, Slots{kSlot}, 16) == Blocks{kLast - 1}));
  CHECK_THROWS(IntegrityError, dead_blocks(Blocks{kLast}, Slots{kSlot + 1}, 16), "is live");
  CHECK_THROWS(IntegrityError, dead_blocks(Blocks{0}, Slots{std::int64_t{1} << 36}, 16), "4294967296");
}

TEST(the_largest_blocks_end_beyond_all_slots) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  CHECK(dead_blocks(Blocks{0, 1}, Slots{kMost, kMost - 1, kMost}, kMost).empty());
  CHECK((dead_blocks(Blocks{0, 1}, Slots{kMost, kMost - 1, kMost}, kMost / 2 + 1) == Blocks{0}));
}

TEST(wrong_arguments_are_refused) {
  CHECK_THROWS(std::invalid_argument, dead_blocks(Blocks{1}, Slots{4}, 0), "block_size=0");
  CHECK_THROWS(std::invalid_argument, dead_blocks(Blocks{1, -1}, Slots{4}, 4), "block -1");
  CHECK_THROWS(IntegrityError, dead_blocks(Blocks{1, 2}, Slots{4, 12}, 4), "slot 12", "block 3", "2 blocks");
  CHECK_THROWS(IntegrityError, dead_blocks(Blocks{0}, Slots{-1}, 4), "slot -1");
  CHECK_THROWS(IntegrityError, dead_blocks(Blocks{}, Slots{0}, 4), "slot 0");
}

TEST(it_equals_the_nested_loops) {
  std::mt19937 random(5);
  const auto pick = [&random](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
  for (int round = 0; round < 500; ++round) {
    const std::int64_t block_size = 1 + static_cast<std::int64_t>(pick(17));
    // Runs of ids, and ids that are far apart by a power of two, are what a hash may be bad at.
    const BlockId stride = BlockId{1} << pick(12);
    Blocks blocks(1 + pick(60));
    for (BlockId& block : blocks) block = static_cast<BlockId>(pick(80)) * stride;
    Slots live(pick(60));
    for (std::int64_t& slot : live) {
      slot = std::int64_t{blocks[pick(blocks.size())]} * block_size +
             static_cast<std::int64_t>(pick(static_cast<std::size_t>(block_size)));
    }
    Blocks expected;
    for (const BlockId block : blocks) {
      const bool alive =
          std::any_of(live.begin(), live.end(), [&](std::int64_t slot) { return slot / block_size == block; });
      const bool seen = std::find(expected.begin(), expected.end(), block) != expected.end();
      if (!alive && !seen) expected.push_back(block);
    }
    CHECK(dead_blocks(blocks, live, block_size) == expected);
  }
}

}  // namespace
