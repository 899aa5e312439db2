// nitro._native: the bridge. Messages come in and go out as one-dimensional arrays of MESSAGE.
//
// The GIL is kept while messages are published and polled: that takes microseconds and never blocks, it serialises
// access to an end, and to give it up could cost a whole switching interval (5 ms) to get it back. It is released where
// the file system is involved: making a segment allocates its memory, and both that and the look at old ones read
// /proc.

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nitro/bridge.hpp"

namespace py = pybind11;

// In place of PYBIND11_NUMPY_DTYPE, which writes a format string with a stream (text.hpp says why there are none).
template <>
struct py::detail::npy_format_descriptor<nitro::Message> {
  static constexpr auto name = const_name("MESSAGE");

  static py::dtype dtype() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::dtype> made;
    return made.call_once_and_store_result(make).get_stored();
  }

 private:
  static py::dtype make() {
    using nitro::Message;
    py::list names, formats, offsets;
    const auto field = [&]<typename T>(const char* field_name, std::size_t offset, T Message::*) {
      names.append(field_name);
      formats.append(py::dtype::of<T>());
      offsets.append(offset);
    };
    field("request", offsetof(Message, request), &Message::request);
    field("step", offsetof(Message, step), &Message::step);
    field("run", offsetof(Message, run), &Message::run);
    field("epoch", offsetof(Message, epoch), &Message::epoch);
    field("logical_len", offsetof(Message, logical_len), &Message::logical_len);
    field("physical_len", offsetof(Message, physical_len), &Message::physical_len);
    field("keep", offsetof(Message, keep), &Message::keep);
    field("flags", offsetof(Message, flags), &Message::flags);
    return {std::move(names), std::move(formats), std::move(offsets), sizeof(Message)};
  }
};

namespace nitro {
namespace {

py::object producer_state(const Consumer& consumer) {
  switch (consumer.producer()) {
    case Consumer::Peer::kAlive:
      return py::bool_(true);
    case Consumer::Peer::kEnded:
      return py::bool_(false);
    case Consumer::Peer::kNone:
      break;
  }
  return py::none();
}

py::dict layout() {
  py::dict offsets;
  offsets["version"] = offsetof(Header, version);
  offsets["byte_order"] = offsetof(Header, byte_order);
  offsets["header_size"] = offsetof(Header, header_size);
  offsets["record_size"] = offsetof(Header, record_size);
  offsets["capacity"] = offsetof(Header, capacity);
  offsets["engine"] = offsetof(Header, engine);
  offsets["rank"] = offsetof(Header, rank);
  offsets["owner"] = offsetof(Header, owner);
  offsets["pid_namespace"] = offsetof(Header, pid_namespace);
  offsets["time_namespace"] = offsetof(Header, time_namespace);
  offsets["boot"] = offsetof(Header, boot);
  offsets["head"] = offsetof(Header, head);
  offsets["tail"] = offsetof(Header, tail);
  offsets["producer"] = offsetof(Header, producer);
  offsets["records"] = sizeof(Header);
  return offsets;
}

}  // namespace

void bind_bridge(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> bridge_error;
  bridge_error.call_once_and_store_result(
      [] { return py::object(py::module_::import("nitro.errors").attr("BridgeError")); });
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const SegmentError& error) {
      py::set_error(bridge_error.get_stored(), error.what());
    }
  });

  m.attr("MESSAGE") = py::dtype::of<Message>();
  m.attr("RING_LAYOUT") = layout();
  m.attr("SHARED_MEMORY") = kSharedMemory;

  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Consumer>(m, "RingConsumer")
      .def(py::init<std::uint64_t, std::uint32_t, std::uint64_t>(), py::arg("engine"), py::arg("rank"),
           py::arg("capacity"), Released())
      .def_property_readonly("name", &Consumer::name)
      .def(
          "poll",
          [](Consumer& self, std::size_t most) {
            const std::vector<Message> messages = self.poll(most);
            return py::array_t<Message>(static_cast<py::ssize_t>(messages.size()), messages.data());
          },
          py::arg("most"))
      .def("producer_alive", producer_state)
      .def("unlink", &Consumer::unlink)
      .def("broken", &Consumer::broken)
      .def("counters",
           [](const Consumer& self) { return py::make_tuple(self.counters().received, self.counters().corrupt); });

  py::class_<Producer>(m, "RingProducer")
      .def(py::init<const std::string&>(), py::arg("name"), Released())
      .def(
          "publish",
          [](Producer& self, const Array<Message>& messages) { return self.publish(view("messages", messages)); },
          py::arg("messages"))
      .def(
          "withdraw",
          [](Producer& self, const Array<std::uint64_t>& requests) { self.withdraw(view("requests", requests)); },
          py::arg("requests"))
      .def("consumer_alive", [](const Producer& self) { return !self.consumer_has_ended(); })
      .def("waiting", &Producer::waiting)
      .def("broken", &Producer::broken)
      .def("counters", [](const Producer& self) {
        const WriterCounters& totals = self.counters();
        return py::make_tuple(totals.published, totals.replaced, totals.withdrawn);
      });

  m.def("segment_name", segment_name, py::arg("engine"), py::arg("rank"));
  m.def("remove_if_stale", remove_if_stale, py::arg("name"), Released());
}

}  // namespace nitro
