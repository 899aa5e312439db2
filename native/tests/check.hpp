// The few lines of a test framework that these tests need: named cases, and checks that go on after a failure.

#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace check {

using Case = void (*)();

// Registers a case at static initialisation; run() in check.cpp's main() runs them in order.
struct Registration {
  Registration(const char* name, Case body);
};

// Counts a check, and prints and counts a failure.
void report(bool passed, const char* file, int line, std::string_view what);

// Calls body, which must throw Error with a message that contains all of fragments.
template <typename Error, typename Body, typename... Fragments>
void throws(const char* file, int line, Body&& body, const Fragments&... fragments) {
  try {
    body();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    const bool complete = ((message.find(fragments) != std::string_view::npos) && ...);
    report(complete, file, line, std::string("message: ") + error.what());
    return;
  } catch (const std::exception& error) {
    report(false, file, line, std::string("wrong class of exception: ") + error.what());
    return;
  }
  report(false, file, line, "nothing was thrown");
}

}  // namespace check

#define TEST(name)                                                          \
  static void test_##name();                                                \
  static const check::Registration registration_##name{#name, test_##name}; \
  static void test_##name()

#define CHECK(condition) check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

// CHECK_THROWS(Error, expression, "fragment of the message"...)
#define CHECK_THROWS(Error, expression, ...) \
  check::throws<Error>(__FILE__, __LINE__, [&] { static_cast<void>(expression); }, __VA_ARGS__)
