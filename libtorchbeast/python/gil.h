// Python's global interpreter lock (GIL) between C++ threads.
//
// Rules of these bindings:
// - What blocks runs under WithoutGil. So no thread holds the GIL while it waits for a
//   C++ lock whose holder waits for the GIL.
// - C++ threads never take the GIL to release a Python object: they leave it to the
//   next thread that has the GIL, see keep. So an actor pool runs without Python.
// - When the interpreter has ended, no other thread touches Python: a thread that needs
//   the GIL sleeps until the process is gone, as in Python 3.14. Before that, servers
//   are stopped and pools closed, see at_exit.

#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>

#include "../sync.h"

namespace torchbeast::python {

namespace py = pybind11;

// Whether this process is a fork of the one that has used this module first. Threads of
// ours and of gRPC are missing there, and locks may be held for ever.
bool is_fork();
// Throws std::runtime_error in a fork. Constructors and all that may wait call it.
void check_process();

// Releases the GIL, which the thread holds, until the end of the scope. One thread at a
// time. Throws as check_process().
class WithoutGil {
 public:
  WithoutGil() : state_((check_process(), PyEval_SaveThread())) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// The result of f(), which runs without the GIL.
template <typename F>
auto without_gil(F&& f) {
  WithoutGil no_gil;
  return f();
}

// Takes the GIL in any thread, whether it holds it or not, until the end of the scope.
// One thread at a time.
class WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// A reference to a Python object that may be dropped by any thread, without the GIL and
// after the interpreter's end. The object is released by the next thread that enters or
// leaves these bindings, or soon by the main thread. get() is the PyObject*.
// REQUIRES: the GIL is held.
std::shared_ptr<void> keep(py::object object);

// Releases the objects whose references have been dropped. REQUIRES: the GIL is held.
void release_dropped();

// Calls what may run for long, such as a method of an environment. If the interpreter
// ends meanwhile, Python before 3.14 ends the thread by unwinding its stack, at the
// next attempt to take the GIL. That would run C++ destructors without the GIL. So the
// thread sleeps from there on, see the rules above. Throws py::error_already_set.
py::object call(py::handle function, const py::tuple& arguments = py::tuple());

// A Python function that an object of ours calls. Python's garbage collector sees it,
// see References in bindings.h. REQUIRES, but for the destructor: the GIL is held.
class Callback {
 public:
  // Throws py::type_error if it can't be called: `wanted`, not so.
  Callback(py::object function, const std::string& wanted);
  // As call(). Throws std::runtime_error if it was collected.
  py::object operator()(const py::tuple& arguments = py::tuple()) const;
  PyObject* get() const { return static_cast<PyObject*>(kept_.get()); }  // may be null
  void clear();  // it is garbage, and so is the object that has it

 private:
  std::shared_ptr<void> kept_;
};

// Lets Python's signal handlers run; throws what they raise. REQUIRES: the GIL is held.
void raise_signals();

// Python code has raised KeyboardInterrupt, which can't go on from there: the next
// check_signals() in this thread raises it again.
void raise_later();

// For the core's waits: lets Python's signal handlers run, so that Ctrl-C ends the wait
// with KeyboardInterrupt.
const Interrupt& check_signals();

// Calls `f` before the interpreter ends, without the GIL, unless `owner` is gone by
// then. REQUIRES: the GIL is held.
void at_exit(const std::shared_ptr<void>& owner, std::function<void()> f);

// Called once, when the module is made.
void register_exit();

}  // namespace torchbeast::python
