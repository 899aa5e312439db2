#include "nitro/segment.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <new>
#include <utility>

#include "nitro/process.hpp"
#include "text.hpp"

namespace nitro {
namespace {

constexpr mode_t kMode = 0600;

class File {  // closes what it holds
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  [[nodiscard]] int get() const noexcept { return descriptor_; }
  [[nodiscard]] int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::string shm_path(const std::string& name) { return "/" + name; }

std::string file_path(const std::string& name) { return text(kSharedMemory, "/", name); }

std::string remedy(int error, std::uint64_t needed) {
  switch (error) {
    case ENOENT:
      return text(kSharedMemory, " is missing: mount a tmpfs there");
    case EACCES:
    case EPERM:
    case EROFS:
      return text("this user (", ::geteuid(), ") cannot write to ", kSharedMemory,
                  ": mount it writable, with mode 1777");
    case ENOSPC:
    case ENOMEM: {
      struct statvfs space{};
      const bool known = ::statvfs(kSharedMemory, &space) == 0;
      return text(needed, " bytes are needed",
                  known ? text(" and ", static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize, " of ",
                               static_cast<std::uint64_t>(space.f_blocks) * space.f_frsize, " are free")
                        : std::string(),
                  ": make ", kSharedMemory, " larger (in containers --shm-size), or remove files from it");
    }
    case EEXIST:
      return "a segment of this name exists: choose another engine id for each engine";
    case EMFILE:
    case ENFILE:
      return "too many files are open: raise the limit (ulimit -n)";
    default:
      return "see the system's error";
  }
}

[[noreturn]] void fail(const char* what, const std::string& name, int error, std::uint64_t needed) {
  throw SegmentError(
      text("cannot ", what, " ", file_path(name), ": ", std::strerror(error), "; ", remedy(error, needed)));
}

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw SegmentError(text(file_path(name), " ", why));
}

template <typename Call>
int uninterrupted(Call call) {
  int result;
  do result = call();
  while (result == -1 && errno == EINTR);
  return result;
}

std::size_t size_for(std::uint64_t capacity) { return sizeof(Header) + capacity * sizeof(Record); }

bool is_capacity(std::uint64_t capacity) {
  return std::has_single_bit(capacity) && capacity >= kLeastCapacity && capacity <= kMostCapacity;
}

// Why this file cannot be a segment of ours, or nothing.
std::string objection(const struct stat& status) {
  if (!S_ISREG(status.st_mode)) return "is not a regular file";
  if (status.st_uid != ::geteuid()) {
    return text("belongs to user ", status.st_uid, " and not to this one (", ::geteuid(), ")");
  }
  if ((status.st_mode & 07777) != kMode) return "has another mode than 0600";
  if (status.st_size < static_cast<off_t>(sizeof(Header))) return "is smaller than a header";
  return {};
}

ProcessPlace place_of(const Header& header) {
  return {.pid_namespace = header.pid_namespace, .time_namespace = header.time_namespace, .boot = header.boot};
}

// Returns the capacity, which is not looked at again: whoever can open the segment can change it.
std::uint64_t checked_capacity(const std::string& name, const Header& header, std::uint64_t size) {
  constexpr const char* kSame = ": scheduler and workers must run the same Nitro";
  // Acquire: the rest of the header was written before the magic.
  if (header.magic.load(std::memory_order_acquire) != kMagic) refuse(name, "has no header of Nitro's");
  if (header.byte_order != kByteOrder) refuse(name, "was written in another byte order: use one architecture");
  if (header.version != kLayoutVersion) {
    refuse(name, text("has layout version ", header.version, ", this is ", kLayoutVersion, kSame));
  }
  if (header.header_size != sizeof(Header) || header.record_size != sizeof(Record)) {
    refuse(name, text("has a header of ", header.header_size, " and records of ", header.record_size,
                      " bytes, these are ", sizeof(Header), " and ", sizeof(Record), kSame));
  }
  const std::uint64_t capacity = header.capacity;
  if (!is_capacity(capacity) || size != size_for(capacity)) {
    refuse(name, text("says that it has ", capacity, " records, in ", size, " bytes: it is damaged"));
  }
  if (segment_name(header.engine, header.rank) != name) {
    refuse(name, text("is the segment ", segment_name(header.engine, header.rank), " under another name"));
  }
  return capacity;
}

// The writing end has one holder. One that has ended left it behind.
void claim(const std::string& name, Header& header) {
  const ProcessKey mine = key_of_this_process();
  ProcessKey holder = header.producer.load(std::memory_order_acquire);
  do {
    if (holder != 0 && !has_ended(holder)) {
      refuse(name, text("is written by process ", pid_of(holder), " already: give each worker a ring of its own"));
    }
  } while (!header.producer.compare_exchange_weak(holder, mine, std::memory_order_acq_rel, std::memory_order_acquire));
}

}  // namespace

std::string segment_name(std::uint64_t engine, std::uint32_t rank) {
  std::array<char, 16> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), engine, 16).ptr;
  const std::string hexadecimal(digits.data(), end);
  return text("nitro-", ::geteuid(), "-", std::string(digits.size() - hexadecimal.size(), '0'), hexadecimal, "-", rank);
}

Segment Segment::create(std::uint64_t engine, std::uint32_t rank, std::uint64_t capacity) {
  if (!is_capacity(capacity)) {
    throw std::invalid_argument(text("capacity=", capacity, " is not a power of two in [", kLeastCapacity, ", ",
                                     kMostCapacity, "]: pass the next larger one"));
  }
  const ProcessPlace place = ProcessPlace::of_this_process();
  const ProcessKey owner = key_of_this_process();
  const std::string name = segment_name(engine, rank);
  const std::size_t size = size_for(capacity);

  const int file = uninterrupted([&] { return ::shm_open(shm_path(name).c_str(), O_CREAT | O_EXCL | O_RDWR, kMode); });
  if (file == -1) fail("create", name, errno, size);
  Segment segment(name, file, true);  // from here on, an exception removes it
  if (uninterrupted([&] { return ::flock(file, LOCK_EX); }) != 0) fail("lock", name, errno, size);
  if (::fchmod(file, kMode) != 0) fail("set the mode of", name, errno, size);  // a umask may have taken bits away
  // Not ftruncate(), which promises memory that may not be there at the first access (SIGBUS).
  int error;
  do error = ::posix_fallocate(file, 0, static_cast<off_t>(size));
  while (error == EINTR);
  if (error != 0) fail("allocate", name, error, size);
  segment.map(file, size);
  segment.capacity_ = capacity;

  auto* header = new (segment.header_) Header{};
  header->version = kLayoutVersion;
  header->byte_order = kByteOrder;
  header->header_size = sizeof(Header);
  header->record_size = sizeof(Record);
  header->capacity = capacity;
  header->engine = engine;
  header->rank = rank;
  header->owner = owner;
  header->pid_namespace = place.pid_namespace;
  header->time_namespace = place.time_namespace;
  header->boot = place.boot;
  header->magic.store(kMagic, std::memory_order_release);
  return segment;
}

Segment Segment::attach(const std::string& name) {
  const int descriptor = uninterrupted([&] { return ::shm_open(shm_path(name).c_str(), O_RDWR | O_NONBLOCK, 0); });
  if (descriptor == -1) {
    if (errno == ENOENT) refuse(name, "does not exist: its engine has ended, or runs with another /dev/shm");
    if (errno == EACCES) refuse(name, "belongs to another user: run scheduler and workers as one");
    fail("open", name, errno, 0);
  }
  const File file(descriptor);
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) fail("look at", name, errno, 0);
  if (const std::string why = objection(status); !why.empty()) refuse(name, why + ": it is no segment of Nitro's");

  Segment segment(name, -1, false);
  // No more of it, which would take memory, before it is known to be one of ours: what bears the name may be huge.
  segment.map(file.get(), sizeof(Header));
  segment.capacity_ = checked_capacity(name, *segment.header_, static_cast<std::uint64_t>(status.st_size));
  segment.map(file.get(), size_for(segment.capacity_));
  Header& header = *segment.header_;
  if (place_of(header) != ProcessPlace::of_this_process()) {
    refuse(name, "was made in another pid or time namespace: run scheduler and workers in one container");
  }
  if (has_ended(header.owner)) refuse(name, text("was made by process ", pid_of(header.owner), ", which has ended"));
  claim(name, header);
  segment.claimed_ = true;
  return segment;
}

void Segment::map(int file, std::size_t size) {
  // Populated: no page faults in the first step.
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory == MAP_FAILED) fail("map", name_, errno, size);
  if (header_ != nullptr) ::munmap(header_, size_);
  header_ = static_cast<Header*>(memory);
  size_ = size;
}

Segment::Segment(std::string name, int file, bool owner)
    : name_(std::move(name)), file_(file), owner_(owner), pid_(::getpid()) {}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      owner_(std::exchange(other.owner_, false)),
      claimed_(std::exchange(other.claimed_, false)),
      pid_(other.pid_),
      size_(std::exchange(other.size_, 0)),
      capacity_(other.capacity_),
      header_(std::exchange(other.header_, nullptr)) {}

Segment::~Segment() {
  unlink();
  if (claimed_ && pid_ == ::getpid()) header_->producer.store(0, std::memory_order_release);
  if (header_ != nullptr) ::munmap(header_, size_);
  if (file_ != -1) ::close(file_);
}

std::span<Record> Segment::records() const noexcept {
  return {reinterpret_cast<Record*>(header_ + 1), static_cast<std::size_t>(capacity_)};
}

void Segment::unlink() noexcept {
  if (owner_ && pid_ == ::getpid()) ::shm_unlink(shm_path(name_).c_str());
  owner_ = false;
}

void Segment::check_process() const {
  if (pid_ != ::getpid()) {
    throw SegmentError(text(file_path(name_), " was opened by process ", pid_, ", of which this one (", ::getpid(),
                            ") was forked: open a ring of its own in each process"));
  }
}

bool remove_if_stale(const std::string& name) {
  struct stat status{};
  // O_NONBLOCK: what only bears the name might be a pipe.
  const File file(::shm_open(shm_path(name).c_str(), O_RDONLY | O_NONBLOCK, 0));
  if (file.get() == -1 || ::fstat(file.get(), &status) != 0 || !objection(status).empty()) return false;

  // Read, not mapped: whoever made this file may cut it off meanwhile.
  alignas(Header) std::array<std::byte, sizeof(Header)> bytes;
  if (::pread(file.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return false;
  const auto& header = *reinterpret_cast<const Header*>(bytes.data());
  // In all versions of the layout these lie where they do now. A segment that is just being made has no magic yet.
  if (header.magic.load(std::memory_order_relaxed) != kMagic || header.byte_order != kByteOrder) return false;
  if (segment_name(header.engine, header.rank) != name) return false;

  ProcessPlace here;
  try {
    here = ProcessPlace::of_this_process();
  } catch (const SegmentError&) {
    return false;  // who makes a segment will be told
  }
  if (header.boot != here.boot) return false;  // another kernel's locks are not seen here
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return false;
  // Ids of another namespace say nothing; there the lock alone does.
  if (place_of(header) == here && !has_ended(header.owner)) return false;
  return ::shm_unlink(shm_path(name).c_str()) == 0;
}

}  // namespace nitro
