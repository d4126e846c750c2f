#include "gil.h"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace torchbeast::python {
namespace {

struct ExitCall {
  std::weak_ptr<void> owner;
  std::function<void()> f;
};

struct State {
  std::vector<ExitCall> exit_calls;  // guarded by the GIL

  std::mutex mutex;
  std::vector<PyObject*> dropped;  // guarded by the mutex, as the next two
  bool pending = false;            // the main thread has been asked to release them
  bool ended = false;              // Python must not be asked for anything any more

  std::atomic<bool> ending{false};
  std::thread::id ending_thread;  // set before `ending`
  // Threads on their way to the GIL. The end waits until each thread that counted
  // itself here before has got it.
  std::atomic<int> waiting{0};
};
// Lives as long as the process: threads may come by after the interpreter's end, when
// static objects are being destroyed.
State& state() {
  static auto* const instance = std::make_unique<State>().release();
  return *instance;
}

// Calls `take`, which takes the GIL, unless the interpreter has ended.
template <typename F>
auto take_gil(F&& take) {
  State& all = state();
  {
    ++all.waiting;
    const AtEnd arrived([&all] { --all.waiting; });
    if (!all.ending || all.ending_thread == std::this_thread::get_id()) return take();
  }
  for (;;) pause();
}

int release_pending(void*) {
  release_dropped();
  return 0;
}

void drop(PyObject* object) {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.ended) return;
  all.dropped.push_back(object);
  if (!all.pending) all.pending = Py_AddPendingCall(release_pending, nullptr) == 0;
}

void end() {
  if (is_fork()) return;
  State& all = state();
  std::vector<ExitCall> calls;
  calls.swap(all.exit_calls);
  {
    WithoutGil no_gil;
    for (const ExitCall& call : calls) {
      if (const auto owner = call.owner.lock()) call.f();
    }
  }
  all.ending_thread = std::this_thread::get_id();
  all.ending = true;
  // A thread that waits for the GIL asks for it every 5 ms, and gets it here.
  const auto deadline = Clock::now() + Milliseconds(1000);
  while (all.waiting > 0 && Clock::now() < deadline) {
    WithoutGil no_gil;
    std::this_thread::yield();
  }
  release_dropped();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.ended = true;
}

}  // namespace

bool is_fork() {
  static const pid_t process = getpid();
  return getpid() != process;
}

void check_process() {
  if (!is_fork()) return;
  throw std::runtime_error(
      "libtorchbeast can't be used in a fork of a process that has used it: start "
      "processes with multiprocessing.get_context(\"spawn\")");
}

WithoutGil::~WithoutGil() {
  take_gil([this] { PyEval_RestoreThread(state_); });
  release_dropped();
}

WithGil::WithGil() : state_(take_gil([] { return PyGILState_Ensure(); })) {}

WithGil::~WithGil() { PyGILState_Release(state_); }

std::shared_ptr<void> keep(py::object object) {
  PyObject* const pointer = object.release().ptr();
  return std::shared_ptr<void>(pointer,
                               [](void* p) { drop(static_cast<PyObject*>(p)); });
}

void release_dropped() {
  State& all = state();
  std::vector<PyObject*> objects;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.dropped.empty()) return;
    objects.swap(all.dropped);
    all.pending = false;
  }
  // Their destructors may run any Python code, also such that drops more.
  for (PyObject* object : objects) Py_DECREF(object);
}

py::object call(py::handle function, const py::tuple& arguments) {
  PyObject* result = nullptr;
#if defined(__GLIBCXX__)
  try {
    result = PyObject_CallObject(function.ptr(), arguments.ptr());
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else  // elsewhere a thread ends without unwinding
  result = PyObject_CallObject(function.ptr(), arguments.ptr());
#endif
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

Callback::Callback(py::object function, const std::string& wanted) {
  if (PyCallable_Check(function.ptr()) == 0) {
    throw py::type_error(wanted + ", not " + std::string(py::repr(function)));
  }
  kept_ = keep(std::move(function));
}

py::object Callback::operator()(const py::tuple& arguments) const {
  const auto function = py::reinterpret_borrow<py::object>(get());
  if (!function) throw std::runtime_error("the object that calls this is gone");
  return call(function, arguments);
}

void Callback::clear() {
  kept_ = nullptr;
  release_dropped();
}

void raise_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

namespace {

thread_local bool raises_later = false;

void look_for_signals() {
  WithGil gil;
  release_dropped();
  if (std::exchange(raises_later, false)) {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw py::error_already_set();
  }
  raise_signals();
}

}  // namespace

void raise_later() { raises_later = true; }

const Interrupt& check_signals() {
  static const auto* const instance =
      std::make_unique<const Interrupt>(look_for_signals).release();
  return *instance;
}

void at_exit(const std::shared_ptr<void>& owner, std::function<void()> f) {
  auto& calls = state().exit_calls;
  for (auto call = calls.begin(); call != calls.end();) {
    call = call->owner.expired() ? calls.erase(call) : call + 1;
  }
  calls.push_back({owner, std::move(f)});
}

void register_exit() {
  py::module_::import("atexit").attr("register")(py::cpp_function(&end));
}

}  // namespace torchbeast::python
