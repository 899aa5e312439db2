#include "nitro/process.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <string>

#include "nitro/segment.hpp"
#include "text.hpp"

namespace nitro {
namespace {

struct Status {
  char state = '?';
  std::int64_t threads = 0;
  std::uint64_t start_ticks = 0;
};

// The first line of a short file, or nothing.
std::optional<std::string> line_of(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return std::nullopt;
  std::array<char, 1024> line;
  const bool read = std::fgets(line.data(), static_cast<int>(line.size()), file) != nullptr;
  std::fclose(file);
  if (!read) return std::nullopt;
  std::string found = line.data();
  if (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

// Nothing if /proc does not show the process.
std::optional<Status> status_of(pid_t pid) {
  const std::optional<std::string> line = line_of(text("/proc/", pid, "/stat"));
  if (!line) return std::nullopt;
  // The second field is the program's name in parentheses, and may hold blanks and parentheses itself.
  const std::size_t name_end = line->rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  Status status;
  const int found = std::sscanf(line->c_str() + name_end + 1,
                                " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s"  // 3, 4 to 19
                                " %" SCNd64 " %*s %" SCNu64,                                           // 20, 21, 22
                                &status.state, &status.threads, &status.start_ticks);
  if (found != 3) return std::nullopt;
  return status;
}

std::uint64_t namespace_of(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? status.st_ino : 0;
}

[[noreturn]] void without_proc(const char* path) {
  throw SegmentError(text(path,
                          " cannot be read, and without it nobody can tell whether a process is still there: mount "
                          "proc on /proc"));
}

}  // namespace

ProcessPlace ProcessPlace::of_this_process() {
  ProcessPlace place;
  place.pid_namespace = namespace_of("/proc/self/ns/pid");
  if (place.pid_namespace == 0) without_proc("/proc/self/ns/pid");
  place.time_namespace = namespace_of("/proc/self/ns/time");
  const char* boot_path = "/proc/sys/kernel/random/boot_id";
  const std::optional<std::string> boot = line_of(boot_path);
  if (!boot) without_proc(boot_path);
  boot->copy(place.boot.data(), place.boot.size());
  return place;
}

ProcessKey key_of_this_process() {
  const pid_t pid = ::getpid();
  const std::optional<Status> status = status_of(pid);
  if (!status) without_proc("/proc/self/stat");
  return process_key(static_cast<std::uint64_t>(pid), status->start_ticks);
}

bool has_ended(ProcessKey key) {
  const pid_t pid = pid_of(key);
  if (pid <= 0) return true;
  if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::optional<Status> status = status_of(pid);
  if (!status) return false;  // /proc may hide processes (hidepid), but kill() has found it
  if (process_key(static_cast<std::uint64_t>(pid), status->start_ticks) != key) return true;
  // A first thread that has ended is shown as a zombie while others of its process go on.
  return (status->state == 'Z' || status->state == 'X') && status->threads <= 1;
}

}  // namespace nitro
