// The Python module `libtorchbeast`: its exceptions. bindings.h lists the rest.

#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "../batching.h"
#include "../stream_spec.h"
#include "../transport.h"
#include "bindings.h"
#include "gil.h"

namespace torchbeast::python {
namespace {

// A new class, which lives as long as the process.
PyObject* add_error(py::module_& m, const char* name, PyObject* base, const char* doc) {
  const std::string full_name = std::string("libtorchbeast.") + name;
  PyObject* const error =
      PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base, nullptr);
  if (error == nullptr) throw py::error_already_set();
  m.add_object(name, error);
  return error;
}

// What Python raises for what the core throws. A text may hold what a peer has sent.
void bind_errors(py::module_& m) {
  static PyObject* const closed = add_error(
      m, "ClosedBatchingQueue", PyExc_RuntimeError, "The queue or batcher was closed.");
  static PyObject* const async =
      add_error(m, "AsyncError", PyExc_RuntimeError,
                "The batch that a computation was part of has no answer.");
  static PyObject* const transport =
      add_error(m, "TransportError", PyExc_RuntimeError,
                "A connection could not be made, was lost or refused.");
  static PyObject* const refused =
      add_error(m, "RefusedError", transport,
                "The other side refuses: a wrong token, another version, ...");
  static PyObject* const wire = add_error(m, "WireError", PyExc_RuntimeError,
                                          "The other side broke the protocol's rules.");
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](PyObject* type, const std::exception& error) {
      PyErr_SetObject(type, to_text(error.what()).ptr());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const py::builtin_exception&) {
      throw;  // the next translator's
    } catch (const ClosedBatchingQueue& error) {
      raise(closed, error);
    } catch (const AsyncError& error) {
      raise(async, error);
    } catch (const RefusedError& error) {
      raise(refused, error);
    } catch (const TransportError& error) {
      raise(transport, error);
    } catch (const WireError& error) {
      raise(wire, error);
    } catch (const std::invalid_argument& error) {
      raise(PyExc_ValueError, error);
    } catch (const std::runtime_error& error) {
      raise(PyExc_RuntimeError, error);
    }
  });
}

}  // namespace

PYBIND11_MODULE(libtorchbeast, m) {
  m.doc() =
      R"(The C++ core of PolyBeast: queues, batching, actor pool, environments.

Nests are tuples, lists and dicts of leaves; leaves are torch tensors on the CPU or NumPy
arrays. What comes out has tuples and dicts. Its leaves share memory with the core: torch
tensors if torch is imported, else NumPy arrays. torch is never imported here.

Calls that block let other threads run, and Ctrl-C interrupts them.
)";
  bind_errors(m);
  bind_security(m);
  bind_batching(m);
  bind_listener(m);
  bind_pool(m);
  bind_environments(m);
  register_exit();
}

}  // namespace torchbeast::python
