// Binds the transports to peers of other nodes.
#include "cuda_host/remote.h"

#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "cuda_host/nccl.h"
#include "cuda_host/nvshmem.h"

namespace py = pybind11;

namespace flux::host {

void bind_remote(py::module_& m) {
  using Addresses = std::vector<std::uintptr_t>;
  py::register_exception<PeerLost>(m, "PeerLostError", PyExc_RuntimeError);
  py::class_<Remote, std::shared_ptr<Remote>>(m, "Remote", "Peers of other nodes.")
      .def("close", &Remote::close, py::call_guard<WithoutGil>());
  py::class_<DirectRemote, Remote, std::shared_ptr<DirectRemote>>(m, "DirectRemote")
      .def(py::init([](std::shared_ptr<Driver> driver, int rank, std::vector<int> others,
                       Addresses data, Addresses mail, Addresses status, int boxes) {
             return std::make_shared<DirectRemote>(
                 std::move(driver), DirectPeers{rank, std::move(others), std::move(data),
                                                std::move(mail), std::move(status), boxes});
           }),
           py::kw_only(), py::arg("driver"), py::arg("rank"), py::arg("others"), py::arg("data"),
           py::arg("mail"), py::arg("status"), py::arg("boxes"));
  py::class_<NcclRemote, Remote, std::shared_ptr<NcclRemote>>(m, "NcclRemote")
      .def(py::init([](std::shared_ptr<Driver> driver, std::string library, const py::bytes& id,
                       int rank, int world, Address data, int blocks, std::uint64_t timeout_ns) {
             NcclSetup setup{std::move(library), id, rank, world, data, blocks, timeout_ns};
             const WithoutGil release;
             return std::make_shared<NcclRemote>(std::move(driver), std::move(setup));
           }),
           py::kw_only(), py::arg("driver"), py::arg("library"), py::arg("id"), py::arg("rank"),
           py::arg("world"), py::arg("data"), py::arg("blocks"), py::arg("timeout_ns"));
  py::class_<NvshmemRemote, Remote, std::shared_ptr<NvshmemRemote>>(m, "NvshmemRemote")
      .def(py::init([](std::shared_ptr<Driver> driver, Address put, Address raise, Address relay,
                       Address node_sum, int rank, int world, std::vector<int> others, Address data,
                       Address mail, Address status, int boxes) {
             NvshmemPeers peers{reinterpret_cast<PutSignal>(put),
                                reinterpret_cast<RaiseSignal>(raise),
                                reinterpret_cast<SendSums>(relay),
                                reinterpret_cast<AddUpNodes>(node_sum),
                                rank,
                                world,
                                std::move(others),
                                data,
                                mail,
                                status,
                                boxes};
             return std::make_shared<NvshmemRemote>(std::move(driver), std::move(peers));
           }),
           py::kw_only(), py::arg("driver"), py::arg("put"), py::arg("raise_"), py::arg("relay"),
           py::arg("node_sum"), py::arg("rank"), py::arg("world"), py::arg("others"),
           py::arg("data"), py::arg("mail"), py::arg("status"), py::arg("boxes"));
  m.def(
      "nccl_unique_id",
      [](const std::string& library) { return py::bytes(nccl_unique_id(library)); },
      py::arg("library"));
  m.def("mail_words", &mail_words, py::arg("world"), py::arg("boxes"));
}

}  // namespace flux::host
