// Error messages from their parts.

#pragma once

#include <sstream>
#include <string>

namespace nitro {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace nitro
