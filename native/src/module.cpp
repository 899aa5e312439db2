// nitro._native: bindings only. Arrays come in as one-dimensional, and go out as fresh NumPy arrays; short columns that
// Python makes, or takes apart, element by element are lists, which costs less than the way through NumPy.
//
// The GIL is kept during a Collector's calls: they take microseconds, and it is what serialises access to it. The sweep
// takes milliseconds for a million slots and touches its arguments alone, so that it runs without.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nitro/collector.hpp"
#include "nitro/sweep.hpp"

namespace py = pybind11;

namespace {

using nitro::Array;
using nitro::view;

py::array_t<std::int32_t> to_numpy(const std::vector<std::int32_t>& values) {
  return py::array_t<std::int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

// By index: the tables and destinations of evictions that are not in place.
using Moves = std::map<std::size_t, std::pair<Array<std::int32_t>, Array<std::int32_t>>>;

using Column = std::vector<std::int32_t>;

std::vector<nitro::Eviction> evictions_of(const Column& requests, const Column& physical, const Column& keep,
                                          const Column& count, const Column& first, const Column& last,
                                          const Moves& moves) {
  const std::size_t size = requests.size();
  for (const Column* column : {&physical, &keep, &count, &first, &last}) {
    if (column->size() != size) {
      throw py::value_error("a column has " + std::to_string(column->size()) + " entries, requests " +
                            std::to_string(size) + ": pass one for each request");
    }
  }
  std::vector<nitro::Eviction> evictions;
  evictions.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    evictions.push_back({.request = requests[i],
                         .physical = physical[i],
                         .keep = keep[i],
                         .in_place = true,
                         .count = count[i],
                         .first = first[i],
                         .last = last[i],
                         .blocks = {},
                         .dst = {}});
  }
  for (const auto& [index, arrays] : moves) {
    if (index >= size) {
      throw py::value_error("moves has index " + std::to_string(index) + ", but there are " + std::to_string(size) +
                            " requests");
    }
    evictions[index].in_place = false;
    evictions[index].blocks = view("blocks", arrays.first);
    evictions[index].dst = view("dst", arrays.second);
  }
  return evictions;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Nitro's C++ core. Use it through nitro.collector and nitro.ipc.";

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

  nitro::bind_bridge(m);

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
          "commit_all",
          [](Collector& self, const Column& requests, const Column& physical, const Column& keep, const Column& count,
             const Column& first, const Column& last, const Moves& moves) {
            nitro::Committed done = self.commit_all(evictions_of(requests, physical, keep, count, first, last, moves));
            py::array_t<std::int32_t> moved({py::ssize_t{2}, static_cast<py::ssize_t>(done.moved.size())});
            std::copy(done.moved.begin(), done.moved.end(), moved.mutable_data());
            std::copy(done.moved_to.begin(), done.moved_to.end(), moved.mutable_data() + done.moved.size());
            return std::tuple(std::move(done.epochs), to_numpy(done.src), std::move(moved), to_numpy(done.freed));
          },
          py::arg("requests"), py::arg("physical"), py::arg("keep"), py::arg("count"), py::arg("first"),
          py::arg("last"), py::arg("moves"))
      .def(
          "adopt_all",
          [](Collector& self, const Column& requests, const Column& counts, const Column& blocks) {
            self.adopt_all(requests, counts, blocks);
          },
          py::arg("requests"), py::arg("counts"), py::arg("blocks"))
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
      .def(
          "check_pool",
          [](const Collector& self, const Array<std::int32_t>& free, const Array<std::int32_t>& live) {
            self.check_pool(view("free", free), view("live", live));
          },
          py::arg("free"), py::arg("live"))
      .def("__len__", &Collector::size);

  m.def(
      "dead_blocks",
      [](const Array<std::int32_t>& blocks, const Array<std::int64_t>& live, std::int64_t block_size) {
        const std::span<const std::int32_t> asked = view("blocks", blocks);
        const std::span<const std::int64_t> slots = view("live", live);
        std::vector<std::int32_t> dead;
        {
          const py::gil_scoped_release released;
          dead = nitro::dead_blocks(asked, slots, block_size);
        }
        return to_numpy(dead);
      },
      py::arg("blocks"), py::arg("live"), py::arg("block_size"));
}
