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

namespace torchbeast::python {
namespace {

// What Python raises for a T.
template <typename T>
py::object add_error(py::module_& m, const char* name,
                     py::handle base = PyExc_RuntimeError) {
  py::object error = py::register_local_exception<T>(m, name, base);
  error.attr("__doc__") = doc(name);
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
  add_error<ClosedBatchingQueue>(m, "ClosedBatchingQueue");
  add_error<AsyncError>(m, "AsyncError");
  const py::object transport = add_error<TransportError>(m, "TransportError");
  add_error<RefusedError>(m, "RefusedError", transport);
  add_error<WireError>(m, "WireError");
}

}  // namespace

PYBIND11_MODULE(libtorchbeast, m) {
  m.doc() = doc("");
  // While threads run, an import may be their last act, if the interpreter ends.
  for (const char* name : {"arguments", "ctrl_c"}) python_half(name);
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
