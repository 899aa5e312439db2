// Error messages from their parts.

#pragma once

#include <string>
#include <type_traits>

namespace nitro {

// Not with streams, which must not be used in this library: they look up facets by ids that a second copy of libstdc++
// in the process (some Python packages link one statically, and export it) may have numbered otherwise.
template <typename Part>
void append(std::string& out, const Part& part) {
  if constexpr (std::is_integral_v<Part> && !std::is_same_v<Part, char>) {
    out += std::to_string(part);
  } else {
    out += part;
  }
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

}  // namespace nitro
