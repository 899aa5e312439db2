// What the files of the binding share.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string>

namespace nitro {

// Without forcecast, int64 arrays are refused rather than narrowed; non-contiguous ones are copied.
template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <typename T>
std::span<const T> view(const char* name, const Array<T>& array) {
  if (array.ndim() != 1) {
    throw pybind11::value_error(std::string(name) + " has " + std::to_string(array.ndim()) +
                                " dimensions: pass a one-dimensional array");
  }
  return {array.data(), static_cast<std::size_t>(array.size())};
}

void bind_bridge(pybind11::module_& m);

}  // namespace nitro
