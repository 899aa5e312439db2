// nitro._native: bindings only. Arrays come in as one-dimensional, and go out as fresh NumPy arrays.
//
// The GIL is kept during all calls: they take microseconds, and it is what serialises access to a Collector.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "nitro/collector.hpp"

namespace py = pybind11;

namespace {

// Without forcecast, int64 arrays are refused rather than narrowed; non-contiguous ones are copied.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const char* name, const Array<T>& array) {
  if (array.ndim() != 1) {
    throw py::value_error(std::string(name) + " has " + std::to_string(array.ndim()) +
                          " dimensions: pass a one-dimensional array");
  }
  return {array.data(), static_cast<std::size_t>(array.size())};
}

py::array_t<std::int32_t> to_numpy(const std::vector<std::int32_t>& values) {
  return py::array_t<std::int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Nitro's C++ core. Use it through nitro.collector.";

  // A std::logic_error would become a RuntimeError; users catch Nitro's own class.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> integrity_error;
  integrity_error.call_once_and_store_result(
      [] { return py::object(py::module_::import("nitro.errors").attr("IntegrityError")); });
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const nitro::IntegrityError& error) {
      py::set_error(integrity_error.get_stored(), error.what());
    }
  });

  using nitro::Collector;
  using nitro::Handle;
  py::class_<Collector>(m, "Collector")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("null_block"))
      .def(
          "plan",
          [](const Collector& self, Handle request, const Array<std::int32_t>& blocks,
             const Array<std::uint8_t>& reusable, std::int64_t physical, std::int64_t keep) {
            return to_numpy(self.plan(request, view("blocks", blocks), view("reusable", reusable), physical, keep));
          },
          py::arg("request"), py::arg("blocks"), py::arg("reusable"), py::arg("physical"), py::arg("keep"))
      .def(
          "commit",
          [](Collector& self, Handle request, const Array<std::int32_t>& blocks, const Array<std::int32_t>& dst,
             std::int64_t physical, std::int64_t keep) {
            return to_numpy(self.commit(request, view("blocks", blocks), view("dst", dst), physical, keep));
          },
          py::arg("request"), py::arg("blocks"), py::arg("dst"), py::arg("physical"), py::arg("keep"))
      .def(
          "adopt",
          [](Collector& self, Handle request, const Array<std::int32_t>& blocks) {
            self.adopt(request, view("blocks", blocks));
          },
          py::arg("request"), py::arg("blocks"))
      .def("release", &Collector::release, py::arg("request"))
      .def("evicted", &Collector::evicted, py::arg("request"))
      .def("epoch", &Collector::epoch, py::arg("request"))
      .def(
          "owned", [](const Collector& self, Handle request) { return to_numpy(self.owned(request)); },
          py::arg("request"))
      .def("owner", &Collector::owner, py::arg("block"))
      .def("counters",
           [](const Collector& self) {
             const nitro::Counters& totals = self.counters();
             return py::make_tuple(totals.evictions, totals.tokens_evicted, totals.blocks_freed);
           })
      .def("check_integrity", &Collector::check_integrity)
      .def("__len__", &Collector::size);
}
