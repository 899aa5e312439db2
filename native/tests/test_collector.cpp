// Each rule of the ledger by itself, with a pool of 16 blocks of 4 tokens whose null block is 0.

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ledger.hpp"
#include "nitro/collector.hpp"

namespace nitro {

// Plants faults behind the ledger's back.
struct CollectorProbe {
  Collector& collector;

  void set_owner(BlockId block, Handle owner) { collector.owner_[static_cast<std::size_t>(block)] = owner; }
  void append_block(Handle request, BlockId block) { collector.accounts_.at(request).blocks.push_back(block); }
  void set_epoch(Handle request, std::int64_t epoch) { collector.accounts_.at(request).epoch = epoch; }
  void set_kept(Handle request, std::int64_t kept) { collector.accounts_.at(request).kept = kept; }
  void add_evicted(Handle request, std::int64_t tokens) { collector.accounts_.at(request).evicted += tokens; }
};

}  // namespace nitro

namespace {

using ledger::adopt;
using ledger::commit;
using nitro::BlockId;
using nitro::Collector;
using nitro::CollectorProbe;
using nitro::Committed;
using nitro::Counters;
using nitro::Eviction;
using nitro::IntegrityError;
using nitro::kNeedsFresh;
using nitro::kNobody;
using Blocks = std::vector<BlockId>;
using Evictions = std::vector<Eviction>;
using Flags = std::vector<std::uint8_t>;

Collector pool() { return {16, 4, 0}; }

// Request 7 owns {5, 2}: table {1, 2, 3, 4} with 15 slots, shrunk to 6; block 1 was shared.
Collector with_request_7() {
  Collector collector = pool();
  static_cast<void>(commit(collector, 7, Blocks{1, 2, 3, 4}, Blocks{5, 2}, 15, 6));
  return collector;
}

TEST(constructor_refuses_impossible_pools) {
  CHECK_THROWS(std::invalid_argument, Collector(0, 4, 0), "num_blocks=0", "[1, ");
  CHECK_THROWS(std::invalid_argument, Collector(-3, 4, 0), "num_blocks=-3");
  CHECK_THROWS(std::invalid_argument, Collector(std::int64_t{1} << 31, 4, 0), "num_blocks=2147483648");
  CHECK_THROWS(std::invalid_argument, Collector(16, 0, 0), "block_size=0");
  CHECK_THROWS(std::invalid_argument, Collector(16, 4, 16), "null_block=16");
  CHECK_THROWS(std::invalid_argument, Collector(16, 4, -1), "null_block=-1");
  CHECK(Collector(1, 1, 0).size() == 0);
}

TEST(plan_keeps_reusable_blocks_in_place) {
  const Collector collector = pool();
  const Blocks table{1, 2, 3, 4};
  CHECK((collector.plan(7, table, Flags{1, 1, 1, 1}, 16, 8) == Blocks{1, 2}));
  CHECK((collector.plan(7, table, Flags{0, 1, 1, 1}, 15, 9) == Blocks{kNeedsFresh, 2, 3}));
  CHECK((collector.plan(7, table, Flags{0, 0, 0, 0}, 13, 1) == Blocks{kNeedsFresh}));
  CHECK((collector.plan(7, table, Flags{2, 255, 0, 0}, 16, 15) == Blocks{1, 2, kNeedsFresh, kNeedsFresh}));
  CHECK(collector.size() == 0);
}

TEST(plan_rounds_up_at_block_borders) {
  const Collector collector = pool();
  const Blocks table{1, 2, 3, 4};
  const Flags all{1, 1, 1, 1};
  CHECK(collector.plan(7, table, all, 16, 3).size() == 1);
  CHECK(collector.plan(7, table, all, 16, 4).size() == 1);
  CHECK(collector.plan(7, table, all, 16, 5).size() == 2);
  CHECK_THROWS(IntegrityError, collector.plan(7, table, all, 17, 4), "physical=17", "need 5", "has 4");
}

TEST(plan_refuses_lengths_that_no_eviction_has) {
  const Collector collector = pool();
  const Blocks table{1, 2};
  CHECK_THROWS(std::invalid_argument, collector.plan(7, table, Flags{1}, 8, 5), "reusable has 1", "keep=5", "need 2");
  CHECK_THROWS(std::invalid_argument, collector.plan(7, table, Flags{1, 1}, 8, 0), "keep=0");
  CHECK_THROWS(std::invalid_argument, collector.plan(7, table, Flags{1, 1}, 8, 8), "keep=8", "physical=8");
  CHECK_THROWS(std::invalid_argument, collector.plan(7, table, Flags{1, 1}, -8, -9), "keep=-9");
  CHECK_THROWS(std::invalid_argument, collector.plan(-1, table, Flags{1, 1}, 8, 4), "handle -1");
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  CHECK_THROWS(IntegrityError, collector.plan(7, table, Flags{1, 1}, kHuge, kHuge - 1), "has 2");
}

TEST(tables_with_impossible_blocks_are_found) {
  Collector collector = with_request_7();
  const Flags two{1, 1};
  CHECK_THROWS(IntegrityError, collector.plan(8, Blocks{6, 16}, two, 8, 4), "#8", "block 16", "[0, 16)");
  CHECK_THROWS(IntegrityError, collector.plan(8, Blocks{6, -1}, two, 8, 4), "block -1");
  CHECK_THROWS(IntegrityError, collector.plan(8, Blocks{0, 6}, two, 8, 4), "block 0", "null block");
  CHECK_THROWS(IntegrityError, collector.plan(8, Blocks{6, 6}, two, 8, 4), "block 6", "twice");
  CHECK_THROWS(IntegrityError, collector.plan(8, Blocks{6, 5}, two, 8, 4), "#8", "block 5", "#7");
  CHECK_THROWS(IntegrityError, commit(collector, 8, Blocks{6, 5}, Blocks{6}, 8, 4), "#8", "block 5", "#7");
}

TEST(commit_books_the_destination_and_frees_the_rest_last_first) {
  Collector collector = pool();
  const Blocks freed = commit(collector, 7, Blocks{1, 2, 3, 4}, Blocks{5, 2}, 15, 6);
  CHECK((freed == Blocks{4, 3, 1}));
  CHECK((collector.owned(7) == Blocks{5, 2}));
  CHECK(collector.owner(5) == 7 && collector.owner(2) == 7);
  CHECK(collector.owner(1) == kNobody && collector.owner(3) == kNobody && collector.owner(4) == kNobody);
  CHECK(collector.evicted(7) == 9 && collector.epoch(7) == 1 && collector.size() == 1);
  CHECK((collector.counters() == Counters{.evictions = 1, .tokens_evicted = 9, .blocks_freed = 2}));
  collector.check_integrity();
}

TEST(commit_within_a_block_frees_nothing) {
  Collector collector = pool();
  CHECK(commit(collector, 7, Blocks{1, 2}, Blocks{1, 2}, 8, 7).empty());
  CHECK((collector.counters() == Counters{.evictions = 1, .tokens_evicted = 1, .blocks_freed = 0}));
  CHECK((collector.owned(7) == Blocks{1, 2}));
}

TEST(commit_frees_lookahead_blocks_too) {
  Collector collector = pool();
  CHECK((commit(collector, 7, Blocks{1, 2, 3, 4}, Blocks{1}, 5, 2) == Blocks{4, 3, 2}));
  CHECK(collector.counters().blocks_freed == 3);
}

TEST(commit_can_move_all_survivors_into_fresh_blocks) {
  Collector collector = pool();
  CHECK((commit(collector, 7, Blocks{1, 2, 3}, Blocks{4, 5, 6}, 12, 11) == Blocks{3, 2, 1}));
  CHECK((collector.counters() == Counters{.evictions = 1, .tokens_evicted = 1, .blocks_freed = 0}));
}

TEST(evictions_of_one_request_add_up) {
  Collector collector = with_request_7();
  adopt(collector, 7, Blocks{9, 1});
  CHECK((collector.owned(7) == Blocks{5, 2, 9, 1}));
  CHECK((commit(collector, 7, Blocks{5, 2, 9, 1}, Blocks{5, 2}, 16, 6) == Blocks{1, 9}));
  CHECK(collector.evicted(7) == 19 && collector.epoch(7) == 2);
  CHECK((collector.counters() == Counters{.evictions = 2, .tokens_evicted = 19, .blocks_freed = 4}));
  collector.check_integrity();
}

TEST(commit_refuses_bad_destinations) {
  Collector collector = with_request_7();
  const Blocks table{6, 8, 9};
  CHECK_THROWS(std::invalid_argument, commit(collector, 8, table, Blocks{6}, 12, 6), "dst has 1", "need 2");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, kNeedsFresh}, 12, 6), "block -1");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, 16}, 12, 6), "block 16");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, 0}, 12, 6), "null block");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{10, 10}, 12, 6), "block 10", "twice");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, 9}, 12, 6), "block 9", "same table");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{8, 6}, 12, 6), "block 8", "same table");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, 6}, 12, 6), "block 6");
  CHECK_THROWS(IntegrityError, commit(collector, 8, table, Blocks{6, 2}, 12, 6), "fresh block 2", "#7");
}

TEST(a_refused_call_changes_nothing) {
  Collector collector = with_request_7();
  const Counters before = collector.counters();
  CHECK_THROWS(IntegrityError, commit(collector, 8, Blocks{6, 8}, Blocks{2}, 8, 4), "#7");
  CHECK_THROWS(IntegrityError, commit(collector, 7, Blocks{5, 2}, Blocks{0}, 6, 4), "null block");
  CHECK_THROWS(IntegrityError, adopt(collector, 7, Blocks{9, 10, 9}), "block 9", "twice");
  CHECK((collector.owned(7) == Blocks{5, 2}));
  CHECK(collector.size() == 1 && collector.epoch(7) == 1 && collector.evicted(8) == 0 && collector.owned(8).empty());
  CHECK(collector.counters() == before);
  CHECK(collector.owner(6) == kNobody && collector.owner(9) == kNobody && collector.owner(10) == kNobody);
  collector.check_integrity();
}

TEST(a_table_must_be_what_the_ledger_says) {
  Collector collector = with_request_7();
  const Flags flags{1, 1, 1};
  CHECK_THROWS(IntegrityError, collector.plan(7, Blocks{5, 2, 9}, flags, 9, 4), "#7", "table of 3", "the 2 blocks",
               "adopt_all()");
  CHECK_THROWS(IntegrityError, collector.plan(7, Blocks{2, 5}, Flags{1, 1}, 8, 4), "#7");
  CHECK_THROWS(IntegrityError, collector.plan(7, Blocks{5, 2}, Flags{1, 1}, 5, 4), "physical=5", "left 6");
  CHECK((collector.plan(7, Blocks{5, 2}, Flags{1, 1}, 6, 4) == Blocks{5}));
}

Eviction in_place(nitro::Handle request, std::int64_t physical, std::int64_t keep, std::int64_t count, BlockId first,
                  BlockId last) {
  return {.request = request,
          .physical = physical,
          .keep = keep,
          .in_place = true,
          .count = count,
          .first = first,
          .last = last,
          .blocks = {},
          .dst = {}};
}

Eviction move(nitro::Handle request, const Blocks& blocks, const Blocks& dst, std::int64_t physical,
              std::int64_t keep) {
  return {.request = request, .physical = physical, .keep = keep, .blocks = blocks, .dst = dst};
}

TEST(a_step_evicts_from_old_and_new_requests_together) {
  Collector collector = with_request_7();
  adopt(collector, 7, Blocks{1, 3});
  const Blocks table{6, 8, 9, 10};
  const Blocks dst{11, 8};
  const Committed done = collector.commit_all(
      Evictions{in_place(7, 13, 4, 4, 5, 3), move(8, table, dst, 12, 7)});  // block 10 is a lookahead block
  CHECK((done.epochs == std::vector<std::int32_t>{1, 0}));
  CHECK((done.src == Blocks{5, 2, 1, 3, 6, 8, 9}));
  CHECK((done.moved == std::vector<std::int32_t>{4}) && (done.moved_to == Blocks{11}));
  CHECK((done.freed == Blocks{3, 1, 2, 10, 9, 6}));
  CHECK((collector.owned(7) == Blocks{5}) && (collector.owned(8) == Blocks{11, 8}));
  CHECK(collector.owner(2) == kNobody && collector.owner(8) == 8 && collector.owner(6) == kNobody);
  CHECK(collector.evicted(7) == 18 && collector.epoch(7) == 2 && collector.evicted(8) == 5);
  CHECK((collector.counters() == Counters{.evictions = 3, .tokens_evicted = 23, .blocks_freed = 7}));
  collector.check_integrity();
}

TEST(an_empty_step_changes_nothing) {
  Collector collector = with_request_7();
  const Committed done = collector.commit_all({});
  CHECK(done.epochs.empty() && done.src.empty() && done.moved.empty() && done.freed.empty());
  CHECK(collector.counters().evictions == 1);
}

TEST(newcomers_of_one_step_may_share_what_they_give_up) {
  Collector collector = pool();
  const Blocks mine{1, 2, 3};
  const Blocks yours{1, 2, 4};
  const Committed done =
      collector.commit_all(Evictions{move(1, mine, Blocks{5}, 12, 4), move(2, yours, Blocks{6}, 12, 4)});
  CHECK((done.freed == Blocks{3, 2, 1, 4, 2, 1}));
  CHECK(collector.owner(5) == 1 && collector.owner(6) == 2 && collector.owner(1) == kNobody);
}

TEST(a_bad_eviction_anywhere_in_a_step_changes_nothing) {
  const Blocks table{6, 8};
  const Blocks one{6};
  const Blocks other{9, 10};
  const Blocks fresh{11};
  const Blocks beyond{16};
  const Blocks taken{8};
  const Blocks stolen{1};
  const struct {
    Eviction eviction;
    std::string_view message;
  } bad[] = {
      {in_place(9, 8, 4, 2, 9, 10), "first eviction"},
      {in_place(7, 13, 4, 3, 5, 3), "table of 3"},
      {in_place(7, 13, 4, 4, 1, 3), "1 to 3"},
      {in_place(7, 13, 4, 4, 5, 2), "5 to 2"},
      {in_place(7, 17, 4, 4, 5, 3), "need 5"},
      {in_place(7, 5, 4, 4, 5, 3), "left 6"},
      {move(9, other, beyond, 8, 4), "block 16"},
      {move(9, other, stolen, 8, 4), "already belongs to request #7"},
      {move(9, other, taken, 8, 4), "table of another request"},
      {move(9, other, fresh, 8, 4), "destination of two"},
      {move(9, other, fresh, 9, 4), "need 3"},
  };
  for (const auto& [eviction, message] : bad) {
    for (const bool last : {false, true}) {
      Collector collector = with_request_7();
      adopt(collector, 7, Blocks{1, 3});
      Evictions step{move(8, table, fresh, 8, 4)};
      step.insert(last ? step.end() : step.begin(), eviction);
      if (eviction.request != 7) step.push_back(in_place(7, 13, 4, 4, 5, 3));
      CHECK_THROWS(IntegrityError, collector.commit_all(step), message);
      CHECK(collector.size() == 1 && collector.epoch(7) == 1 && collector.owned(8).empty());
      CHECK((collector.owned(7) == Blocks{5, 2, 1, 3}) && collector.owner(11) == kNobody);
      CHECK(collector.counters().evictions == 1);
      collector.check_integrity();
    }
  }
  Collector collector = with_request_7();
  const Eviction again = in_place(7, 8, 4, 2, 5, 2);
  CHECK_THROWS(IntegrityError, collector.commit_all(Evictions{again, again}), "#7", "twice in one step");
  CHECK_THROWS(std::invalid_argument, collector.commit_all(Evictions{in_place(7, 8, 8, 2, 5, 2)}), "keep=8");
  CHECK_THROWS(std::invalid_argument, collector.commit_all(Evictions{move(8, table, one, 8, 5)}), "need 2");
  CHECK(collector.epoch(7) == 1 && collector.size() == 1);
}

TEST(adopt_books_only_free_blocks) {
  Collector collector = with_request_7();
  CHECK_THROWS(IntegrityError, adopt(collector, 7, Blocks{2}), "block 2", "#7");
  CHECK_THROWS(IntegrityError, adopt(collector, 7, Blocks{0}), "null block");
  CHECK_THROWS(IntegrityError, adopt(collector, 7, Blocks{99}), "block 99");
  adopt(collector, 7, Blocks{});
  CHECK((collector.owned(7) == Blocks{5, 2}));
  adopt(collector, 8, Blocks{2, 99});  // not in the ledger: the engine's business
  CHECK(collector.size() == 1 && collector.owned(8).empty());
}

TEST(new_blocks_of_a_step_are_booked_together_or_not_at_all) {
  Collector collector = with_request_7();
  static_cast<void>(commit(collector, 8, Blocks{10, 11}, Blocks{10}, 8, 4));
  const std::vector<nitro::Handle> requests{7, 9, 8};
  const std::vector<std::int32_t> counts{1, 2, 1};
  CHECK_THROWS(IntegrityError, collector.adopt_all(requests, counts, Blocks{1, 2, 99, 1}), "#8", "adopted twice");
  CHECK_THROWS(IntegrityError, collector.adopt_all(requests, counts, Blocks{1, 2, 99, 5}), "#8", "#7");
  CHECK_THROWS(std::invalid_argument, collector.adopt_all(requests, counts, Blocks{1, 2, 3}), "add up to 4");
  CHECK((collector.owned(7) == Blocks{5, 2}) && (collector.owned(8) == Blocks{10}) && collector.owner(1) == kNobody);
  collector.check_integrity();
  collector.adopt_all(requests, counts, Blocks{1, 2, 99, 3});  // 9 is not in the ledger
  CHECK((collector.owned(7) == Blocks{5, 2, 1}) && (collector.owned(8) == Blocks{10, 3}) && collector.size() == 2);
  collector.adopt_all(std::vector<nitro::Handle>{7, 8, 7}, std::vector<std::int32_t>{1, 0, 1}, Blocks{4, 6});
  CHECK((collector.owned(7) == Blocks{5, 2, 1, 4, 6}) && collector.owner(6) == 7);
  collector.check_integrity();
}

TEST(release_forgets_and_makes_room) {
  Collector collector = with_request_7();
  CHECK(collector.release(7) == 9);
  CHECK(collector.release(7) == 0);
  CHECK(collector.size() == 0 && collector.epoch(7) == 0 && collector.owned(7).empty());
  CHECK(collector.owner(5) == kNobody);
  CHECK((collector.counters() == Counters{.evictions = 1, .tokens_evicted = 9, .blocks_freed = 2}));
  CHECK((commit(collector, 7, Blocks{5, 2}, Blocks{5}, 8, 4) == Blocks{2}));  // a new life of the same handle
  CHECK(collector.epoch(7) == 1 && collector.evicted(7) == 4);
  collector.check_integrity();
}

TEST(owner_refuses_ids_outside_the_pool) {
  const Collector collector = pool();
  CHECK_THROWS(std::invalid_argument, collector.owner(16), "block 16");
  CHECK_THROWS(std::invalid_argument, collector.owner(-1), "block -1");
}

TEST(check_integrity_finds_planted_faults) {
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.set_owner(9, 7);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "block 9", "#7");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.set_owner(5, kNobody);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "block 5", "#7");
  }
  {
    Collector collector = with_request_7();
    static_cast<void>(commit(collector, 8, Blocks{6, 8}, Blocks{6}, 8, 4));
    CollectorProbe{collector}.append_block(8, 5);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "block 5", "#7", "#8");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.append_block(7, 0);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "null block");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.set_epoch(7, 0);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "0 evictions");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.add_evicted(7, -9);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "0 tokens evicted in 1 evictions");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.set_epoch(7, 2);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "the counters say 1", "histories 2");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.set_kept(7, 9);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "9 slots", "2 blocks");
  }
  {
    Collector collector = with_request_7();
    CollectorProbe{collector}.add_evicted(7, 1);
    CHECK_THROWS(IntegrityError, collector.check_integrity(), "of 9 tokens", "of 10");
  }
}

TEST(an_epoch_that_falls_is_found) {
  Collector collector = with_request_7();
  static_cast<void>(commit(collector, 7, Blocks{5, 2}, Blocks{5}, 6, 4));
  static_cast<void>(commit(collector, 8, Blocks{6, 8}, Blocks{6}, 8, 4));
  collector.check_integrity();
  CollectorProbe{collector}.set_epoch(7, 1);
  CollectorProbe{collector}.set_epoch(8, 2);  // so that the counters are right
  CHECK_THROWS(IntegrityError, collector.check_integrity(), "#7", "epoch 1 comes after epoch 2");
  // A request that starts again begins with epoch 1 again.
  Collector other = with_request_7();
  other.check_integrity();
  static_cast<void>(other.release(7));
  static_cast<void>(commit(other, 7, Blocks{5, 2}, Blocks{5}, 6, 4));
  other.check_integrity();
}

TEST(check_pool_wants_each_block_in_one_place) {
  Collector collector = with_request_7();  // which owns 5 and 2
  const Blocks free{1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  const Blocks live{2, 5, 15};
  collector.check_pool(free, live);
  const auto without = [](Blocks blocks, BlockId block) {
    blocks.erase(std::find(blocks.begin(), blocks.end(), block));
    return blocks;
  };
  const auto with = [](Blocks blocks, BlockId block) {
    blocks.push_back(block);
    return blocks;
  };
  CHECK_THROWS(IntegrityError, collector.check_pool(with(free, 3), live), "block 3 is free twice");
  CHECK_THROWS(IntegrityError, collector.check_pool(free, with(live, 15)), "block 15 is live twice");
  CHECK_THROWS(IntegrityError, collector.check_pool(free, with(live, 3)), "block 3 is free and live");
  CHECK_THROWS(IntegrityError, collector.check_pool(with(free, 0), live), "free block 0 is the null block");
  CHECK_THROWS(IntegrityError, collector.check_pool(free, with(live, 0)), "live block 0 is the null block");
  CHECK_THROWS(IntegrityError, collector.check_pool(with(free, 16), live), "free block 16", "[0, 16)");
  CHECK_THROWS(IntegrityError, collector.check_pool(free, with(live, -1)), "live block -1");
  CHECK_THROWS(IntegrityError, collector.check_pool(without(free, 9), live), "11 free + 3 live + 1", "block 9 is lost");
  CHECK_THROWS(IntegrityError, collector.check_pool(free, without(live, 5)), "block 5 is lost");
  CHECK_THROWS(IntegrityError, collector.check_pool(with(free, 5), without(live, 5)), "block 5 is free", "#7 owns");
  CollectorProbe{collector}.set_owner(9, 7);
  CHECK_THROWS(IntegrityError, collector.check_pool(without(free, 9), with(live, 9)), "block 9 is booked");
}

#ifndef NDEBUG
TEST(debug_builds_check_after_each_change) {
  Collector collector = with_request_7();
  CollectorProbe{collector}.set_owner(9, 7);
  CHECK_THROWS(IntegrityError, adopt(collector, 7, Blocks{10}), "block 9");
}
#endif

TEST(instances_share_nothing) {
  Collector mine = pool();
  Collector yours = pool();
  const auto churn = [](Collector& collector) {
    for (int i = 0; i < 200; ++i) {
      static_cast<void>(commit(collector, i, Blocks{1, 2, 3}, Blocks{1}, 12, 4));
      static_cast<void>(collector.release(i));
    }
  };
  std::thread other([&] { churn(yours); });
  churn(mine);
  other.join();
  CHECK(mine.counters() == yours.counters());
  CHECK(mine.counters().tokens_evicted == 1600);
}

}  // namespace
