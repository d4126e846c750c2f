// What the files of these bindings share. Each bind_...() adds its classes to the
// module.
//
// Methods that block are bound with WithoutGil. Those that wait pass check_signals()
// on. REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "../environment.h"
#include "../events.h"
#include "../expected.h"
#include "../sync.h"
#include "../transport.h"
#include "gil.h"

namespace torchbeast::python {

namespace py = pybind11;

void bind_security(py::module_& m);  // before those that take one
void bind_batching(py::module_& m);
void bind_listener(py::module_& m);  // before bind_pool
void bind_pool(py::module_& m);
void bind_environments(py::module_& m);

// --- The half in Python --------------------------------------------------------------

// The module libtorchbeast_NAME.
py::module_ python_half(const std::string& name);
// As call(): a function of it.
template <typename... Args>
py::object call_half(const std::string& name, const char* function, Args&&... args) {
  return call(python_half(name).attr(function),
              py::make_tuple(std::forward<Args>(args)...));
}
// The docstring of this name, see libtorchbeast_docs.py, which keeps it.
const char* doc(const char* name);

// --- Arguments -----------------------------------------------------------------------
// They throw std::invalid_argument, which names the argument.

// Infinity becomes kNever.
Milliseconds to_milliseconds(double value, const std::string& name, double unit = 1);
Milliseconds to_seconds(double seconds, const std::string& name);
Milliseconds to_positive_seconds(double seconds, const std::string& name);

size_t to_size(int64_t value, const std::string& name, int64_t least = 0);

// None, or a dict of name, num_envs and settings, each of which may be missing.
ExpectedEnvironment to_expected(const py::object& given);

// --- Results -------------------------------------------------------------------------

// Text that a peer may have made up. A byte that is not UTF-8 becomes \x and its
// number.
py::str to_text(const std::string& text);

// A tuple of the events, as ActorPool.events() describes, and the number of forgotten
// ones.
py::tuple to_tuple(const std::pair<std::vector<Event>, uint64_t>& taken);

// --- Environments written in Python --------------------------------------------------

using Settings = std::map<std::string, std::string>;

// A factory that calls env_class for each stream. What Server's docstring says about
// environments is what it does. The hello gets the name and the settings. The factory
// and its environments take the GIL themselves.
EnvironmentFactory environment_factory(std::shared_ptr<Callback> env_class,
                                       std::string name, const Settings& settings);

// --- Classes -------------------------------------------------------------------------

// What an object of ours refers to in Python, for the garbage collector, which may end
// the object if all that refers to it is garbage, too. REQUIRES: the GIL is held.
struct References {
  std::vector<std::shared_ptr<Callback>> callbacks;
  std::vector<PyObject*> objects;  // that it keeps alive

  int visit(visitproc visit, void* arg) const {
    for (const auto& callback : callbacks) Py_VISIT(callback->get());
    for (PyObject* object : objects) Py_VISIT(object);
    return 0;
  }
};

// pybind11 makes memory for an object whose __init__ was not called, and T's methods
// would read it. Call this once all T are bound.
template <typename... T>
void refuse_before_init() {
  for (const py::type& type : {py::type::of<T>()...}) {
    auto* const python = reinterpret_cast<PyTypeObject*>(type.ptr());
    py::detail::get_type_info(python)->operator_new = [](size_t) -> void* {
      throw py::type_error("a method was called before __init__");
    };
  }
}

// Destroys a T without the GIL, since that may wait for threads. A fork leaves it
// alone.
template <typename T>
struct Owner {
  References references;
  void operator()(T* self) {
    if (is_fork()) return;
    std::optional<WithoutGil> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    references = {};  // this may outlive the object, in a weak_ptr
    std::default_delete<T>()(self);
  }
};

// A new T. `end`, if any, is called before the interpreter ends.
template <typename T, typename... Args>
std::shared_ptr<T> make(References references, void (*end)(T&), Args&&... args) {
  check_process();
  T* const pointer = std::make_unique<T>(std::forward<Args>(args)...).release();
  const std::shared_ptr<T> object(pointer, Owner<T>{std::move(references)});
  if (end != nullptr) at_exit(object, [pointer, end] { end(*pointer); });
  return object;
}

// The references of an object that make() has made; null: it has not, or C++ uses the
// object, too, so that Python can't end it.
template <typename T>
References* find_references(PyObject* self) {
  const auto found =
      reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder(
          py::detail::get_type_info(typeid(T)), false);
  if (found.inst == nullptr || !found.holder_constructed()) return nullptr;
  const auto& holder = found.template holder<std::shared_ptr<T>>();
  auto* const owner = std::get_deleter<Owner<T>>(holder);
  return owner != nullptr && holder.use_count() == 1 ? &owner->references : nullptr;
}

// For py::class_: the garbage collector sees the references of Ts.
template <typename T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const References* const references = find_references<T>(self);
      return references == nullptr ? 0 : references->visit(visit, arg);
    };
    type.tp_clear = [](PyObject* self) {
      if (const References* const references = find_references<T>(self)) {
        for (const auto& callback : references->callbacks) callback->clear();
      }
      return 0;
    };
  });
}

}  // namespace torchbeast::python
