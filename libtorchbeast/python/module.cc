// The Python module `libtorchbeast`: its exceptions. bindings.h lists the rest.

#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>

#include "../actor_pool.h"
#include "../batching.h"
#include "../client.h"
#include "../listener.h"
#include "../server.h"
#include "../stream_spec.h"
#include "../transport.h"
#include "bindings.h"
#include "gil.h"

namespace torchbeast::python {
namespace {

// What Python raises for a T.
template <typename T>
py::object add_error(py::module_& m, const char* name, py::handle base,
                     const char* doc) {
  py::object error = py::register_local_exception<T>(m, name, base);
  error.attr("__doc__") = doc;
  return error;
}

void bind_errors(py::module_& m) {
  // The one that is added last is tried first. These texts may hold what a peer has
  // sent; those of the classes below are made printable by the core.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](PyObject* type, const std::exception& error) {
      PyErr_SetObject(type, to_text(error.what()).ptr());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const py::builtin_exception&) {
      throw;  // the next translator's
    } catch (const std::invalid_argument& error) {
      raise(PyExc_ValueError, error);
    } catch (const std::runtime_error& error) {
      raise(PyExc_RuntimeError, error);
    }
  });
  const py::handle base = PyExc_RuntimeError;
  add_error<ClosedBatchingQueue>(m, "ClosedBatchingQueue", base,
                                 "The queue or batcher was closed.");
  add_error<AsyncError>(m, "AsyncError", base,
                        "The batch that a computation was part of has no answer.");
  const py::object transport =
      add_error<TransportError>(m, "TransportError", base,
                                "A connection could not be made, was lost or refused.");
  add_error<RefusedError>(
      m, "RefusedError", transport,
      "The other side refuses: a wrong token, another version, ...");
  add_error<WireError>(m, "WireError", base,
                       "The other side broke the protocol's rules.");
}

}  // namespace

PYBIND11_MODULE(libtorchbeast, m) {
  m.doc() = doc("");
  bind_errors(m);
  bind_security(m);
  bind_batching(m);
  bind_listener(m);
  bind_pool(m);
  bind_environments(m);
  refuse_before_init<BatchingQueue, DynamicBatcher, DynamicBatcher::Batch, EnvServer,
                     EnvClient, ActorPool, Listener, Security>();
  register_exit();
}

}  // namespace torchbeast::python
