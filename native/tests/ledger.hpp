// One request's eviction, and one request's new blocks, by the calls that the ledger has for those of a whole step.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nitro/collector.hpp"

namespace ledger {

// An eviction that is not in place; returns the blocks to give back.
inline std::vector<nitro::BlockId> commit(nitro::Collector& collector, nitro::Handle request,
                                          std::span<const nitro::BlockId> blocks, std::span<const nitro::BlockId> dst,
                                          std::int64_t physical, std::int64_t keep) {
  const nitro::Eviction eviction{.request = request, .physical = physical, .keep = keep, .blocks = blocks, .dst = dst};
  return collector.commit_all({&eviction, 1}).freed;
}

inline void adopt(nitro::Collector& collector, nitro::Handle request, std::span<const nitro::BlockId> blocks) {
  const auto count = static_cast<std::int32_t>(blocks.size());
  collector.adopt_all({&request, 1}, {&count, 1}, blocks);
}

}  // namespace ledger
