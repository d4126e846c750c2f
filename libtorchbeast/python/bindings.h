// What the files of these bindings share. Each bind_...() adds its classes to the
// module.
//
// Methods that block are bound with WithoutGil. Those that wait pass check_signals()
// on. REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

// --- Arguments -----------------------------------------------------------------------
// They throw std::invalid_argument, which names the argument.

// Infinity becomes kNever.
Milliseconds to_milliseconds(double milliseconds, const std::string& name);
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

// --- Classes
// --------------------------------------------------------------------------

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

// --- Objects that have threads -------------------------------------------------------

// A new T. A fork leaves it alone.
template <typename T, typename... Args>
std::shared_ptr<T> make_here(Args&&... args) {
  check_process();
  return {std::make_unique<T>(std::forward<Args>(args)...).release(), [](T* self) {
            if (!is_fork()) std::default_delete<T>()(self);
          }};
}

// A new T that is destroyed without the GIL, since that waits for threads. `end` is
// called before the interpreter ends. A fork leaves it alone.
template <typename T, typename... Args>
std::shared_ptr<T> make_with_threads(void (*end)(T&), Args&&... args) {
  check_process();
  T* const pointer = std::make_unique<T>(std::forward<Args>(args)...).release();
  const std::shared_ptr<T> object(pointer, [](T* self) {
    if (is_fork()) return;
    std::optional<WithoutGil> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    std::default_delete<T>()(self);
  });
  at_exit(object, [pointer, end] { end(*pointer); });
  return object;
}

}  // namespace torchbeast::python
