#include "check.hpp"

#include <cstdio>
#include <utility>
#include <vector>

namespace check {
namespace {

// A function's static, since other files register during static initialisation.
std::vector<std::pair<const char*, Case>>& cases() {
  static std::vector<std::pair<const char*, Case>> all;
  return all;
}

long checks = 0;
long failures = 0;

}  // namespace

Registration::Registration(const char* name, Case body) { cases().emplace_back(name, body); }

void report(bool passed, const char* file, int line, std::string_view what) {
  ++checks;
  if (passed) return;
  ++failures;
  std::printf("%s:%d: failed: %.*s\n", file, line, static_cast<int>(what.size()), what.data());
}

}  // namespace check

int main() {
  using namespace check;
  for (const auto& [name, body] : cases()) {
    const long before = failures;
    try {
      body();
    } catch (const std::exception& error) {
      report(false, name, 0, std::string("uncaught: ") + error.what());
    }
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", name);
  }
  std::printf("%zu cases, %ld checks, %ld failures\n", cases().size(), checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}
