// The linear sweep: which blocks hold nothing that is alive any longer.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nitro/collector.hpp"

namespace nitro {

// Returns the blocks in which no slot is live, each once, in the order of their first occurrence.
//
// blocks: those that are asked about, in any order; one may occur several times (in the tables of several requests).
// live: slots that are in use (block * block_size + offset), in any order; one may occur several times (once for each
// layer and KV head that keeps it).
//
// O(blocks + live) expected: the blocks go into a hash set, in which each live slot marks its block. It touches nothing
// but its arguments, so that it needs no lock.
// Throws std::invalid_argument for a block size below 1 or a negative block, IntegrityError for a live slot in none of
// the blocks: its block has been given up while something in it is still in use.
[[nodiscard]] std::vector<BlockId> dead_blocks(std::span<const BlockId> blocks, std::span<const std::int64_t> live,
                                               std::int64_t block_size);

}  // namespace nitro
