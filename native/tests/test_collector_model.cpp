// A long random life of a block pool, beside plain sets and maps: requests grow, share prefixes, evict, are preempted
// and finish. After each step free + live + null = total, and the ledger says what the model says.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "ledger.hpp"
#include "nitro/collector.hpp"

namespace {

using ledger::adopt;
using ledger::commit;
using nitro::BlockId;
using nitro::Collector;
using nitro::Handle;
using nitro::kNeedsFresh;

constexpr std::int64_t kBlockSize = 4;

struct Request {
  std::vector<BlockId> table;
  std::int64_t slots = 0;
  std::int64_t evicted = 0;
  std::int64_t epoch = 0;
};

class Model {
 public:
  Model(std::uint32_t seed, std::int32_t num_blocks) : random_(seed), num_blocks_(num_blocks) {
    for (BlockId block = 1; block < num_blocks; ++block) free_.push_back(block);
  }

  void step() {
    const auto choice = pick(100);
    if (choice < 8)
      start();
    else if (choice < 45)
      grow();
    else if (choice < 60)
      grow_together();
    else if (choice < 72)
      evict();
    else if (choice < 92)
      evict_together();
    else
      stop();
  }

  void drain() {
    while (!requests_.empty()) stop();
  }

  void verify() const {
    std::vector<BlockId> live;
    for (const auto& [block, references] : references_) {
      CHECK(references > 0);
      live.push_back(block);
    }
    CHECK(free_.size() + live.size() + 1 == static_cast<std::size_t>(num_blocks_));
    CHECK(std::set<BlockId>(free_.begin(), free_.end()).size() == free_.size());
    for (const BlockId block : free_) CHECK(collector_.owner(block) == nitro::kNobody);
    verify_ledger();
    collector_.check_pool(free_, live);
  }

  [[nodiscard]] bool whole() const { return free_.size() + 1 == static_cast<std::size_t>(num_blocks_); }
  [[nodiscard]] const nitro::Counters& totals() const { return totals_; }
  [[nodiscard]] int together() const { return together_; }
  [[nodiscard]] int spoilt() const { return spoilt_; }

 private:
  struct Planned {
    Handle handle;
    std::int64_t keep;
    std::vector<BlockId> dst;
  };

  static constexpr Handle kNegative = std::numeric_limits<Handle>::min() / 2;

  void verify_ledger() const {
    std::size_t in_ledger = 0;
    for (const auto& [handle, request] : requests_) {
      CHECK(collector_.epoch(handle) == request.epoch);
      CHECK(collector_.evicted(handle) == request.evicted);
      if (request.epoch == 0) continue;
      ++in_ledger;
      CHECK(collector_.owned(handle) == request.table);
      for (const BlockId block : request.table) CHECK(references_.at(block) == 1 && collector_.owner(block) == handle);
    }
    CHECK(collector_.size() == in_ledger);
    CHECK(collector_.counters() == totals_);
    collector_.check_integrity();
  }

  std::uint32_t pick(std::uint32_t below) { return static_cast<std::uint32_t>(random_()) % below; }

  std::map<Handle, Request>::iterator any() {
    return std::next(requests_.begin(), pick(static_cast<std::uint32_t>(requests_.size())));
  }

  BlockId take() {
    const std::size_t at = pick(static_cast<std::uint32_t>(free_.size()));
    const BlockId block = free_[at];
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(at));
    references_[block] = 1;
    return block;
  }

  void put(BlockId block) {
    if (--references_.at(block) > 0) return;
    references_.erase(block);
    free_.push_back(block);
  }

  // A new request; half of them share the full blocks of one that has had no eviction (a prefix-cache hit).
  void start() {
    Request request;
    if (!requests_.empty() && pick(2) == 0) {
      const Request& other = any()->second;
      if (other.epoch == 0) {
        request.slots = other.slots / kBlockSize * kBlockSize;
        request.table.assign(other.table.begin(), other.table.begin() + request.slots / kBlockSize);
        for (const BlockId block : request.table) ++references_[block];
      }
    }
    requests_.emplace(next_handle_++, std::move(request));
  }

  void grow() {
    if (requests_.empty()) return;
    const auto at = any();
    Request& request = at->second;
    const std::int64_t slots = request.slots + 1 + pick(9);
    const auto needed = static_cast<std::size_t>((slots + kBlockSize - 1) / kBlockSize);
    if (needed > request.table.size() + free_.size()) return stop();
    std::vector<BlockId> fresh;
    while (request.table.size() + fresh.size() < needed) fresh.push_back(take());
    adopt(collector_, at->first, fresh);
    request.table.insert(request.table.end(), fresh.begin(), fresh.end());
    request.slots = slots;
  }

  // The new blocks of one engine step. Half of the batches hold one that is wrong, and must change nothing.
  void grow_together() {
    std::vector<Handle> handles;
    std::vector<std::int32_t> counts;
    std::vector<BlockId> blocks;
    std::vector<std::size_t> booked;  // where in blocks those of requests of the ledger are
    for (auto& [handle, request] : requests_) {
      const std::int64_t slots = request.slots + 1 + pick(9);
      const auto needed = static_cast<std::size_t>((slots + kBlockSize - 1) / kBlockSize);
      const std::size_t missing = needed > request.table.size() ? needed - request.table.size() : 0;
      if (pick(3) == 0 || missing > free_.size()) continue;
      handles.push_back(handle);
      counts.push_back(static_cast<std::int32_t>(missing));
      for (std::size_t i = 0; i < missing; ++i) {
        if (request.epoch > 0) booked.push_back(blocks.size());
        blocks.push_back(take());
      }
      request.slots = slots;
    }
    if (!booked.empty() && pick(2) == 0) {
      std::vector<BlockId> wrong = blocks;
      const std::size_t at = booked.at(pick(static_cast<std::uint32_t>(booked.size())));
      const std::size_t other = booked.at(pick(static_cast<std::uint32_t>(booked.size())));
      wrong.at(at) = other != at ? wrong.at(other) : (pick(2) == 0 ? 0 : num_blocks_);
      bool refused = false;
      try {
        collector_.adopt_all(handles, counts, wrong);
      } catch (const nitro::IntegrityError&) {
        refused = true;
      }
      CHECK(refused);
      for (const std::size_t i : booked) CHECK(collector_.owner(blocks[i]) == nitro::kNobody);
      collector_.check_integrity();
      ++spoilt_;
    }
    collector_.adopt_all(handles, counts, blocks);
    std::size_t first = 0;
    for (std::size_t i = 0; i < handles.size(); ++i) {
      std::vector<BlockId>& table = requests_.at(handles[i]).table;
      for (std::int32_t j = 0; j < counts[i]; ++j) table.push_back(blocks[first++]);
    }
  }

  void evict() {
    if (requests_.empty()) return;
    const auto at = any();
    Request& request = at->second;
    if (request.slots < 2) return;
    const std::int64_t keep = 1 + pick(static_cast<std::uint32_t>(request.slots - 1));
    std::vector<std::uint8_t> reusable;
    for (const BlockId block : request.table) reusable.push_back(references_.at(block) == 1 ? 1 : 0);
    std::vector<BlockId> dst = collector_.plan(at->first, request.table, reusable, request.slots, keep);
    const auto wanted = static_cast<std::size_t>(std::count(dst.begin(), dst.end(), kNeedsFresh));
    if (wanted > free_.size()) return;
    for (BlockId& block : dst) {
      if (block == kNeedsFresh) block = take();
    }
    const auto freed = commit(collector_, at->first, request.table, dst, request.slots, keep);
    std::vector<BlockId> expected;
    for (const BlockId block : request.table) {
      if (std::find(dst.begin(), dst.end(), block) == dst.end()) expected.insert(expected.begin(), block);
    }
    CHECK(freed == expected);
    for (const BlockId block : freed) put(block);
    totals_.evictions += 1;
    totals_.tokens_evicted += request.slots - keep;
    totals_.blocks_freed += static_cast<std::int64_t>(freed.size() - wanted);
    request.table = dst;
    request.evicted += request.slots - keep;
    request.epoch += 1;
    request.slots = keep;
  }

  // One engine step: several requests at once, in place where they can be, beside a copy of the ledger that books them
  // one by one. Half of the steps hold an eviction that is wrong, and must change nothing.
  void evict_together() {
    std::vector<Planned> planned;
    for (auto& [handle, request] : requests_) {
      if (request.slots < 2 || pick(3) == 0) continue;
      Planned item{.handle = handle, .keep = 1 + pick(static_cast<std::uint32_t>(request.slots - 1)), .dst = {}};
      std::vector<std::uint8_t> reusable;
      for (const BlockId block : request.table) reusable.push_back(references_.at(block) == 1 ? 1 : 0);
      item.dst = collector_.plan(handle, request.table, reusable, request.slots, item.keep);
      if (static_cast<std::size_t>(std::count(item.dst.begin(), item.dst.end(), kNeedsFresh)) > free_.size()) continue;
      for (BlockId& block : item.dst) {
        if (block == kNeedsFresh) block = take();
      }
      planned.push_back(std::move(item));
    }
    std::vector<nitro::Eviction> step;
    for (const Planned& item : planned) {
      const Request& request = requests_.at(item.handle);
      nitro::Eviction eviction{.request = item.handle,
                               .physical = request.slots,
                               .keep = item.keep,
                               .blocks = request.table,
                               .dst = item.dst};
      if (request.epoch > 0 && pick(4) != 0) {
        eviction = {.request = item.handle,
                    .physical = request.slots,
                    .keep = item.keep,
                    .in_place = true,
                    .count = static_cast<std::int64_t>(request.table.size()),
                    .first = request.table.front(),
                    .last = request.table.back(),
                    .blocks = {},
                    .dst = {}};
      }
      step.push_back(eviction);
    }
    if (!step.empty() && pick(2) == 0) {
      std::vector<nitro::Eviction> wrong = step;
      nitro::Eviction& bad = wrong.at(pick(static_cast<std::uint32_t>(wrong.size())));
      pick(2) == 0 ? bad.physical += 1000 : bad.request = next_handle_ + (bad.in_place ? 0 : kNegative);
      bool refused = false;
      try {
        static_cast<void>(collector_.commit_all(wrong));
      } catch (const std::logic_error&) {  // both of the ledger's own classes
        refused = true;
      }
      CHECK(refused);
      verify_ledger();
    }
    Collector twin = collector_;
    const nitro::Committed done = collector_.commit_all(step);
    std::vector<BlockId> freed;
    std::vector<BlockId> stitched = done.src;
    for (std::size_t i = 0; i < done.moved.size(); ++i) {
      stitched.at(static_cast<std::size_t>(done.moved[i])) = done.moved_to[i];
    }
    std::size_t first = 0;
    for (std::size_t i = 0; i < planned.size(); ++i) {
      const auto& [handle, keep, dst] = planned[i];
      Request& request = requests_.at(handle);
      CHECK(done.epochs[i] == request.epoch);
      const auto used = static_cast<std::size_t>((request.slots + kBlockSize - 1) / kBlockSize);
      CHECK(std::equal(dst.begin(), dst.end(), stitched.begin() + static_cast<std::ptrdiff_t>(first)));
      for (std::size_t j = 0; j < used; ++j) {
        CHECK(done.src.at(first + j) == request.table[j]);
      }
      first += used;
      const auto alone = commit(twin, handle, request.table, dst, request.slots, keep);
      freed.insert(freed.end(), alone.begin(), alone.end());
      CHECK(twin.owned(handle) == collector_.owned(handle));
      totals_.evictions += 1;
      totals_.tokens_evicted += request.slots - keep;
      totals_.blocks_freed += static_cast<std::int64_t>(request.table.size() - dst.size());
      request.table = dst;
      request.evicted += request.slots - keep;
      request.epoch += 1;
      request.slots = keep;
      ++together_;
    }
    CHECK(first == done.src.size() && done.freed == freed && twin.counters() == collector_.counters());
    for (const BlockId block : freed) put(block);
  }

  void stop() {
    if (requests_.empty()) return;
    const auto at = any();
    CHECK(collector_.release(at->first) == at->second.evicted);
    for (const BlockId block : at->second.table) put(block);
    requests_.erase(at);
  }

  std::mt19937 random_;
  std::int32_t num_blocks_;
  std::vector<BlockId> free_;
  std::map<BlockId, int> references_;  // of live blocks
  std::map<Handle, Request> requests_;
  Handle next_handle_ = 0;
  nitro::Counters totals_;
  int together_ = 0;
  int spoilt_ = 0;  // batches of new blocks that were refused
  Collector collector_{num_blocks_, kBlockSize, 0};
};

TEST(random_lives_agree_with_the_model) {
  for (const std::uint32_t seed : {1U, 2U, 3U, 4U}) {
    for (const std::int32_t num_blocks : {8, 61}) {
      Model model(seed, num_blocks);
      for (int i = 0; i < 2000; ++i) {
        model.step();
        model.verify();
      }
      CHECK(model.totals().evictions > 100);  // or the run has tested little
      CHECK(model.together() > 60);
      CHECK(model.spoilt() > 20);
      model.drain();
      model.verify();
      CHECK(model.whole());
    }
  }
}

}  // namespace
