// Binds the collectives of ranks on several hosts.
#include "cpu/collectives.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace flux::host {
namespace {

using Seconds = std::chrono::duration<double>;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
}

constexpr const char* kOutcomes[] = {"done", "disagrees", "failed", "ended", "interrupted"};
constexpr const char* kKinds[] = {"none",        "timeout", "mismatch", "peer_failed",
                                  "peer_closed", "ended",   "peer_died"};

std::unique_ptr<Collectives> make_collectives(int rank, std::vector<int> hosts,
                                              const std::vector<std::uintptr_t>& pads,
                                              const std::vector<std::uintptr_t>& data,
                                              const std::vector<int>& descriptors,
                                              std::shared_ptr<Processes> processes,
                                              py::object memory, std::size_t slot_bytes) {
  std::vector<SignalPad*> pad_pointers;
  std::vector<char*> data_pointers;
  for (const auto p : pads) pad_pointers.push_back(reinterpret_cast<SignalPad*>(p));
  for (const auto p : data) data_pointers.push_back(reinterpret_cast<char*>(p));
  return std::make_unique<Collectives>(rank, std::move(hosts), std::move(pad_pointers),
                                       std::move(data_pointers), descriptors, std::move(processes),
                                       keep(std::move(memory)), slot_bytes);
}

// A function of Python, or None. `function` must outlive what is returned.
Progressed progressed(const py::object& function) {
  if (function.is_none()) return nullptr;
  return [&function](std::size_t begin, std::size_t end) {
    const py::gil_scoped_acquire gil;
    function(begin, end);
  };
}

const char* run(Collectives& collectives, int kind, std::uint64_t number, std::uint32_t digest,
                std::uintptr_t in, std::uintptr_t out, std::vector<std::size_t> offsets, int dtype,
                double timeout_s, double spin_s, std::uintptr_t bias, std::size_t columns,
                double scale, std::size_t round_bytes, std::size_t block_columns,
                const py::object& produce, const py::object& consume, const py::object& meanwhile,
                Engine* engine) {
  CollectiveCall call;
  call.kind = static_cast<Collective>(kind);
  call.number = number;
  call.digest = digest;
  call.in = reinterpret_cast<const char*>(in);
  call.out = reinterpret_cast<char*>(out);
  call.offsets = std::move(offsets);
  call.dtype = static_cast<DType>(dtype);
  call.bias = reinterpret_cast<const char*>(bias);
  call.columns = columns;
  call.scale = scale;
  call.round_bytes = round_bytes;
  call.block_columns = block_columns;
  call.produce = progressed(produce);
  call.consume = progressed(consume);
  if (!meanwhile.is_none()) {
    call.meanwhile = [&meanwhile] {
      const py::gil_scoped_acquire gil;
      meanwhile();
    };
  }
  call.timeout = nanoseconds(timeout_s);
  call.spin = nanoseconds(spin_s);
  const auto interrupted = [] {
    const py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  };
  Outcome outcome;
  {
    const WithoutGil release;
    outcome = collectives.run(call, interrupted, engine);
  }
  if (outcome == Outcome::kInterrupted) throw py::error_already_set();
  return kOutcomes[static_cast<int>(outcome)];
}

py::dict report(const Collectives& collectives) {
  const CollectiveReport& r = collectives.report();
  py::dict d;
  d["kind"] = kKinds[static_cast<int>(r.kind)];
  d["peer"] = r.peer;
  d["culprit"] = r.culprit;
  d["expected"] = r.expected;
  d["observed"] = r.observed;
  d["text"] = r.text;
  return d;
}

// The first address of an interface, IPv4 before IPv6, as text; empty without one. Addresses of one
// link only (fe80::) need a scope, and are left out.
std::string interface_address(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  std::string found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr && found.empty(); entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if (name != entry->ifa_name) continue;
      char text[INET6_ADDRSTRLEN] = {};
      if (family == AF_INET) {
        inet_ntop(family, &reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr, text,
                  sizeof(text));
      } else {
        const in6_addr& address = reinterpret_cast<sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
        if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
        inet_ntop(family, &address, text, sizeof(text));
      }
      found = text;
    }
  }
  freeifaddrs(list);
  return found;
}

}  // namespace

void bind_collectives(py::module_& m) {
  py::class_<Collectives>(m, "Collectives")
      .def(py::init(&make_collectives), py::kw_only(), py::arg("rank"), py::arg("hosts"),
           py::arg("pads"), py::arg("data"), py::arg("descriptors"), py::arg("processes"),
           py::arg("memory"), py::arg("slot_bytes"))
      .def("run", &run, py::kw_only(), py::arg("kind"), py::arg("number"), py::arg("digest"),
           py::arg("input"), py::arg("out"), py::arg("offsets"), py::arg("dtype"),
           py::arg("timeout_s"), py::arg("spin_s"), py::arg("bias") = 0, py::arg("columns") = 0,
           py::arg("scale") = 1.0, py::arg("round_bytes") = 0, py::arg("block_columns") = 0,
           py::arg("produce") = py::none(), py::arg("consume") = py::none(),
           py::arg("meanwhile") = py::none(), py::arg("engine") = nullptr)
      .def("report", &report)
      .def("refuse", &Collectives::refuse, py::arg("number"), py::arg("why"),
           py::call_guard<WithoutGil>())
      .def("end_call", &Collectives::end_call)
      .def(
          "close",
          [](Collectives& c, bool failed, int culprit) {
            c.close(failed ? PadState::kFailed : PadState::kClosed, culprit);
          },
          py::arg("failed") = false, py::arg("culprit") = -1, py::call_guard<WithoutGil>())
      .def(
          "set_delay",
          [](Collectives& c, double longest_s, std::uint64_t seed) {
            c.set_delay(nanoseconds(longest_s), seed);
          },
          py::arg("longest_s"), py::arg("seed"))
      .def_property_readonly("bytes_sent", &Collectives::bytes_sent)
      .def_property_readonly("private_bytes", &Collectives::private_bytes);
  m.def(
      "collective_partners",
      [](std::vector<int> hosts, int rank) {
        return Collectives::partners(Placement(std::move(hosts)), rank);
      },
      py::arg("hosts"), py::arg("rank"));
  m.def("interface_address", &interface_address, py::arg("name"));
  m.def("collective_bytes", &Collectives::data_bytes, py::arg("slot_bytes"), py::arg("shares"));
}

}  // namespace flux::host
