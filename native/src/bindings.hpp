// The parts of nitro._native.

#pragma once

#include <pybind11/pybind11.h>

namespace nitro {

void bind_bridge(pybind11::module_& m);

}  // namespace nitro
