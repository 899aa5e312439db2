// Segments in the machine's real /dev/shm: how they are made, opened, left behind and removed, and both ends in two
// processes, of which one is killed.

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "check.hpp"
#include "nitro/bridge.hpp"
#include "ring_memory.hpp"

namespace {

using nitro::Consumer;
using nitro::Header;
using nitro::Message;
using nitro::Producer;
using nitro::SegmentError;
using ring_memory::message;
using ring_memory::whole;
using Messages = std::vector<Message>;

std::uint64_t fresh_engine() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::string path_of(const std::string& name) { return std::string(nitro::kSharedMemory) + "/" + name; }

bool exists(const std::string& name) { return ::access(path_of(name).c_str(), F_OK) == 0; }

// A child that runs body and then ends, unless it is killed before; nothing of the parent's is destroyed in it.
template <typename Body>
pid_t in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      status = body() ? 0 : 2;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(status);
  }
  return child;
}

int status_of(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void kill_now(pid_t child) {
  ::kill(child, SIGKILL);
  CHECK(status_of(child) == -1);
}

// Runs body with the header of a segment that exists, mapped once more.
template <typename Body>
void with_header(const std::string& name, Body body) {
  const int file = ::open(path_of(name).c_str(), O_RDWR);
  void* memory = ::mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  body(*static_cast<Header*>(memory));
  ::munmap(memory, sizeof(Header));
  ::close(file);
}

TEST(a_segment_is_private_complete_and_removed) {
  const std::uint64_t engine = fresh_engine();
  std::string name;
  {
    Consumer consumer(engine, 3, 8);
    name = consumer.name();
    CHECK(name == nitro::segment_name(engine, 3));
    struct stat status{};
    CHECK(::stat(path_of(name).c_str(), &status) == 0);
    CHECK((status.st_mode & 07777) == 0600 && status.st_uid == ::geteuid());
    CHECK(status.st_size == 512 + 8 * 64 && status.st_blocks * 512 >= status.st_size);  // no holes
    CHECK_THROWS(SegmentError, Consumer(engine, 3, 8), path_of(name), "exists", "another engine id");
    CHECK(exists(name));  // the failure has not removed it
    Consumer other(engine, 4, 8);
    CHECK(other.name() != name);
  }
  CHECK(!exists(name) && !exists(nitro::segment_name(engine, 4)));
}

TEST(capacities_are_bounded_powers_of_two) {
  for (const std::uint64_t capacity : {0ULL, 1ULL, 3ULL, 1000ULL, 1ULL << 21, ~0ULL}) {
    CHECK_THROWS(std::invalid_argument, Consumer(fresh_engine(), 0, capacity),
                 "capacity=", "power of two in [2, 1048576]");
  }
}

TEST(one_producer_at_a_time) {
  Consumer consumer(fresh_engine(), 0, 4);
  CHECK(consumer.producer() == Consumer::Peer::kNone);
  {
    Producer producer(consumer.name());
    CHECK(consumer.producer() == Consumer::Peer::kAlive && !producer.consumer_has_ended());
    CHECK_THROWS(SegmentError, Producer(consumer.name()), "is written by process", "ring of its own");
    CHECK(consumer.producer() == Consumer::Peer::kAlive);  // the one that was refused has not taken leave for it
    CHECK(producer.publish(Messages{message(1, 1)}) == 0);
  }
  CHECK(consumer.producer() == Consumer::Peer::kNone);
  Producer next(consumer.name());
  CHECK(next.publish(Messages{message(2, 2)}) == 0);
  CHECK((consumer.poll(9) == Messages{message(1, 1), message(2, 2)}));
}

TEST(a_name_can_go_before_the_ring_does) {
  Consumer consumer(fresh_engine(), 0, 4);
  Producer producer(consumer.name());
  consumer.unlink();
  CHECK(!exists(consumer.name()));
  CHECK(producer.publish(Messages{message(1, 1)}) == 0);
  CHECK((consumer.poll(9) == Messages{message(1, 1)}));
  CHECK_THROWS(SegmentError, Producer(consumer.name()), path_of(consumer.name()), "does not exist");
}

TEST(what_is_not_a_segment_is_refused) {
  Consumer consumer(fresh_engine(), 0, 4);
  const std::string name = consumer.name();
  const auto refused = [&](auto change, auto... fragments) {
    with_header(name, [&](Header& header) {
      const auto keep = std::make_unique<std::array<std::byte, 128>>();
      auto* bytes = reinterpret_cast<std::byte*>(&header);
      std::copy_n(bytes, keep->size(), keep->begin());
      change(header);
      CHECK_THROWS(SegmentError, Producer(name), path_of(name), fragments...);
      CHECK(!nitro::remove_if_stale(name));
      std::copy_n(keep->begin(), keep->size(), bytes);
    });
  };
  refused([](Header& header) { header.magic.store(0); }, "has no header of Nitro's");
  refused([](Header& header) { header.byte_order = 0x04030201; }, "another byte order");
  refused([](Header& header) { header.version = 2; }, "has layout version 2, this is 1", "same Nitro");
  refused([](Header& header) { header.record_size = 48; }, "records of 48 bytes", "same Nitro");
  refused([](Header& header) { header.header_size = 256; }, "a header of 256");
  refused([](Header& header) { header.capacity = 8; }, "8 records, in 768 bytes", "damaged");
  refused([](Header& header) { header.capacity = 3; }, "damaged");
  refused([](Header& header) { header.capacity = 2; }, "2 records, in 768 bytes", "damaged");
  refused([](Header& header) { header.capacity = ~0ULL; }, "damaged");
  refused([](Header& header) { header.engine ^= 1; }, "under another name");
  refused([](Header& header) { header.pid_namespace ^= 1; }, "another pid or time namespace", "one container");
  refused([](Header& header) { header.time_namespace ^= 1; }, "another pid or time namespace");
  refused([](Header& header) { header.owner += 1ULL << 22; }, "which has ended");
  Producer producer(name);  // unharmed

  CHECK(::chmod(path_of(name).c_str(), 0644) == 0);
  CHECK_THROWS(SegmentError, Producer(name), "another mode than 0600");
  CHECK(::chmod(path_of(name).c_str(), 0600) == 0);
  const std::string small = nitro::segment_name(fresh_engine(), 0);
  ::close(::open(path_of(small).c_str(), O_CREAT | O_RDWR, 0600));
  CHECK_THROWS(SegmentError, Producer(small), "smaller than a header");
  CHECK(!nitro::remove_if_stale(small) && ::unlink(path_of(small).c_str()) == 0);
  CHECK(::mkfifo(path_of(small).c_str(), 0600) == 0);
  CHECK_THROWS(SegmentError, Producer(small), "not a regular file");
  CHECK(!nitro::remove_if_stale(small) && ::unlink(path_of(small).c_str()) == 0);
}

// A file with an honest header and a length of a terabyte takes no memory before it is refused.
TEST(a_huge_file_is_refused_before_it_is_mapped) {
  Consumer consumer(fresh_engine(), 0, 4);
  const std::string path = path_of(consumer.name());
  CHECK(::truncate(path.c_str(), off_t{1} << 40) == 0);
  CHECK_THROWS(SegmentError, Producer(consumer.name()), "4 records, in 1099511627776 bytes", "damaged");
  with_header(consumer.name(), [](Header& header) { header.version = 7; });
  CHECK_THROWS(SegmentError, Producer(consumer.name()), "layout version 7, this is 1");
  struct stat status{};
  CHECK(::stat(path.c_str(), &status) == 0 && status.st_blocks * 512 <= 1 << 20);
}

TEST(a_link_to_a_segment_is_no_segment) {
  Consumer consumer(fresh_engine(), 0, 4);
  const std::string alias = nitro::segment_name(fresh_engine(), 0);
  CHECK(::symlink(path_of(consumer.name()).c_str(), path_of(alias).c_str()) == 0);
  CHECK_THROWS(SegmentError, Producer(alias), "cannot open", path_of(alias));
  CHECK(!nitro::remove_if_stale(alias) && ::unlink(path_of(alias).c_str()) == 0);
  CHECK_THROWS(SegmentError, Producer("../etc/hostname"), "cannot open");
  CHECK_THROWS(SegmentError, Producer(""), "cannot open");
  CHECK(exists(consumer.name()));
}

TEST(a_mask_does_not_change_the_mode) {
  const mode_t before = ::umask(0777);
  Consumer consumer(fresh_engine(), 0, 4);
  ::umask(before);
  struct stat status{};
  CHECK(::stat(path_of(consumer.name()).c_str(), &status) == 0 && (status.st_mode & 07777) == 0600);
  Producer producer(consumer.name());
}

TEST(another_users_segment_is_refused_and_stays) {
  if (::geteuid() != 0) return;  // only root can become somebody else
  Consumer consumer(fresh_engine(), 0, 4);
  const pid_t child = in_child([&] {
    if (::seteuid(65534) != 0 || nitro::remove_if_stale(consumer.name())) return false;
    try {
      Producer producer(consumer.name());
    } catch (const SegmentError& error) {
      return std::string(error.what()).find("belongs to another user") != std::string::npos;
    }
    return false;
  });
  CHECK(status_of(child) == 0 && exists(consumer.name()));
  // The file decides, not its name: given away, it is not ours any more.
  CHECK(::chown(path_of(consumer.name()).c_str(), 65534, 65534) == 0);
  CHECK_THROWS(SegmentError, Producer(consumer.name()), "belongs to user 65534", "no segment of Nitro's");
}

TEST(a_process_is_its_id_and_its_start) {
  const nitro::ProcessKey mine = nitro::key_of_this_process();
  CHECK(nitro::pid_of(mine) == ::getpid() && !nitro::has_ended(mine));
  CHECK(nitro::has_ended(mine + (1ULL << 22)));  // the same id, started one tick later
  CHECK(nitro::has_ended(0));

  std::array<int, 2> pipe{};
  CHECK(::pipe(pipe.data()) == 0);
  const pid_t child = in_child([&] {
    const nitro::ProcessKey key = nitro::key_of_this_process();
    return ::write(pipe[1], &key, sizeof key) == sizeof key;
  });
  nitro::ProcessKey theirs = 0;
  CHECK(::read(pipe[0], &theirs, sizeof theirs) == sizeof theirs && nitro::pid_of(theirs) == child);
  siginfo_t info{};
  CHECK(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(nitro::has_ended(theirs));  // a zombie
  CHECK(status_of(child) == 0);
  CHECK(nitro::has_ended(theirs));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// /proc shows it as a zombie, as it would show a process that has ended.
TEST(a_process_lives_on_without_its_first_thread) {
  std::array<int, 2> pipe{};
  CHECK(::pipe(pipe.data()) == 0);
  const pid_t child = in_child([&] {
    std::thread other([&] {
      const nitro::ProcessKey key = nitro::key_of_this_process();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the first thread has ended
      while (::write(pipe[1], &key, sizeof key) == sizeof key) ::pause();
    });
    ::syscall(SYS_exit, 0);  // the thread's end, not the process's
    return false;
  });
  nitro::ProcessKey theirs = 0;
  CHECK(::read(pipe[0], &theirs, sizeof theirs) == sizeof theirs && nitro::pid_of(theirs) == child);
  CHECK(!nitro::has_ended(theirs));
  kill_now(child);
  CHECK(nitro::has_ended(theirs));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(what_a_killed_engine_leaves_is_removed_and_nothing_else) {
  const std::uint64_t engine = fresh_engine();
  const std::string name = nitro::segment_name(engine, 0);
  std::array<int, 2> pipe{};
  CHECK(::pipe(pipe.data()) == 0);
  const pid_t owner = in_child([&] {
    Consumer consumer(engine, 0, 4);
    bool sent = ::write(pipe[1], "x", 1) == 1;
    while (sent) ::pause();
    return sent;
  });
  char byte = 0;
  CHECK(::read(pipe[0], &byte, 1) == 1);
  CHECK(!nitro::remove_if_stale(name) && exists(name));  // it lives

  auto producer = std::make_unique<Producer>(name);
  CHECK(!producer->consumer_has_ended());
  kill_now(owner);
  CHECK(producer->consumer_has_ended());
  CHECK(producer->publish(Messages{message(1, 1)}) == 0);  // nobody reads, nothing blocks

  // Whatever is in doubt stays: somebody holds the lock; the owner's key is that of a living process; another kernel.
  const int file = ::open(path_of(name).c_str(), O_RDWR);
  CHECK(::flock(file, LOCK_SH) == 0);
  CHECK(!nitro::remove_if_stale(name));
  CHECK(::flock(file, LOCK_UN) == 0);
  with_header(name, [&](Header& header) {
    const nitro::ProcessKey dead = std::exchange(header.owner, nitro::key_of_this_process());
    CHECK(!nitro::remove_if_stale(name));
    header.owner = dead;
    header.boot[0] ^= 1;
    CHECK(!nitro::remove_if_stale(name));
    header.boot[0] ^= 1;
  });
  CHECK(::chmod(path_of(name).c_str(), 0640) == 0);
  CHECK(!nitro::remove_if_stale(name));
  CHECK(::chmod(path_of(name).c_str(), 0600) == 0);
  const std::string alias = nitro::segment_name(fresh_engine(), 0);
  CHECK(::rename(path_of(name).c_str(), path_of(alias).c_str()) == 0);
  CHECK(!nitro::remove_if_stale(alias));
  CHECK(::rename(path_of(alias).c_str(), path_of(name).c_str()) == 0);

  CHECK(exists(name) && nitro::remove_if_stale(name) && !exists(name));
  CHECK(!nitro::remove_if_stale(name));
  ::close(file);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// Another namespace's ids say nothing: a process that seems to have ended may live. The lock decides there.
TEST(a_living_owner_in_another_namespace_is_never_robbed) {
  Consumer consumer(fresh_engine(), 0, 4);
  with_header(consumer.name(), [&](Header& header) {
    header.pid_namespace ^= 1;
    header.owner += 1ULL << 22;
  });
  CHECK(!nitro::remove_if_stale(consumer.name()) && exists(consumer.name()));
}

TEST(a_forked_child_neither_uses_nor_removes_what_it_inherits) {
  Consumer consumer(fresh_engine(), 0, 4);
  Producer producer(consumer.name());
  auto inherited = std::make_unique<Consumer>(fresh_engine(), 1, 4);
  auto inherited_end = std::make_unique<Producer>(inherited->name());
  const auto refused = [](auto call) {  // a failed CHECK in the child would not be counted
    try {
      call();
    } catch (const SegmentError& error) {
      return std::string(error.what()).find("was forked") != std::string::npos;
    }
    return false;
  };
  const pid_t child = in_child([&] {
    const bool both = refused([&] { static_cast<void>(consumer.poll(9)); }) &&
                      refused([&] { static_cast<void>(producer.publish(Messages{message(1, 1)})); });
    inherited_end.reset();
    inherited.reset();
    return both;
  });
  CHECK(status_of(child) == 0);
  CHECK(exists(inherited->name()) && inherited->producer() == Consumer::Peer::kAlive);
}

TEST(two_processes_lose_nothing_that_matters) {
  constexpr std::uint64_t kRequests = 50;
  constexpr std::uint64_t kSteps = 2000;
  Consumer consumer(fresh_engine(), 0, 64);
  const pid_t child = in_child([&] {
    Producer producer(consumer.name());
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      Messages batch;
      for (std::uint64_t request = 0; request < kRequests; ++request) batch.push_back(message(request, step));
      static_cast<void>(producer.publish(batch));
    }
    while (producer.publish({}) > 0 && !producer.consumer_has_ended()) std::this_thread::yield();
    return producer.waiting() == 0;
  });
  std::map<std::uint64_t, std::uint64_t> newest;
  std::uint64_t finished = 0;
  bool in_order = true;
  while (finished < kRequests && consumer.producer() != Consumer::Peer::kEnded) {
    const Messages found = consumer.poll(1000);
    if (found.empty()) std::this_thread::yield();
    for (const Message& one : found) {
      in_order = in_order && whole(one) && newest[one.request] < one.step;
      newest[one.request] = one.step;
      if (one.step == kSteps) ++finished;
    }
  }
  CHECK(status_of(child) == 0);
  CHECK(in_order && finished == kRequests);
  CHECK(consumer.counters().corrupt == 0 && !consumer.broken() && consumer.producer() == Consumer::Peer::kNone);
}

// Killed wherever it happens to be, one writer after the other: the reader sees whole records in their order, and each
// next writer goes on.
TEST(a_killed_producer_leaves_whole_records) {
  Consumer consumer(fresh_engine(), 0, 32);
  std::mt19937 random(1);
  std::uint64_t seen = 0;
  for (std::uint64_t life = 1; life <= 60; ++life) {
    const pid_t child = in_child([&] {
      Producer producer(consumer.name());
      for (std::uint64_t step = 1;; ++step) {
        static_cast<void>(producer.publish(Messages{message(life, step), message(life, step), message(life, step)}));
      }
      return true;
    });
    std::uint64_t step = 0;
    bool in_order = true;
    const auto look = [&] {
      for (const Message& one : consumer.poll(1000)) {
        in_order = in_order && whole(one) && one.request == life && one.step >= step;
        step = one.step;
        ++seen;
      }
    };
    while (step == 0) look();
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 1500);
    while (std::chrono::steady_clock::now() < end) look();
    CHECK(consumer.producer() == Consumer::Peer::kAlive);
    kill_now(child);
    CHECK(consumer.producer() == Consumer::Peer::kEnded);
    look();
    CHECK(in_order && consumer.poll(1).empty());
  }
  CHECK(seen > 60 && consumer.counters().corrupt == 0 && !consumer.broken());
}

}  // namespace
