// Environments written in Python, for servers and clients.

#include <google/protobuf/util/json_util.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "nest/pybind.h"

namespace torchbeast::python {
namespace {

using nest::Place;

// Adds what begin_hello() or finish_hello() returns. Throws std::invalid_argument if
// the wire can't have it. REQUIRES: the GIL is held.
void add_json(const py::object& json, wire::EnvHello* hello) {
  wire::EnvHello more;
  const auto status =
      google::protobuf::util::JsonStringToMessage(py::cast<std::string>(json), &more);
  if (!status.ok()) {
    throw std::invalid_argument("a hello that can't be sent: " + status.ToString());
  }
  hello->MergeFrom(more);
}

// The exception as Python prints it, with its traceback.
std::string describe(const py::error_already_set& error) {
  try {
    // An exception that C code raised has no traceback.
    const py::object trace = error.trace() ? error.trace() : py::none();
    return py::cast<py::bytes>(
        call_half("gym", "describe", error.type(), error.value(), trace));
  } catch (const std::exception&) {
    return error.what();
  }
}

// Keeps Python's state of this thread, and so the variables that Python code keeps per
// thread. Without it every step would make a new one. REQUIRES, of both: the GIL is
// held. One thread.
struct ThreadState {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~ThreadState() { PyGILState_Release(state); }
};

// --- Rows ----------------------------------------------------------------------------

// The values as a C-contiguous array of `dtype`, see cast() of libtorchbeast_gym.py.
py::array cast(py::handle value, DType dtype, const Place& place, bool to_bool) {
  const py::object found = call_half("gym", "cast", value, to_numpy(dtype), to_bool);
  if (!py::isinstance<py::str>(found)) return py::cast<py::array>(found);
  throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                              std::string(py::str(found)));
}

// Reads values into arrays that share their memory if dtype and layout allow it. Throws
// std::invalid_argument, which names the place. One thread at a time.
class RowReader {
 public:
  // `single`: values are of one environment, and the arrays' first dimension is 1.
  explicit RowReader(bool single) : single_(single) {}

  // Forgets what keeps the arrays of the last row alive.
  void clear() { held_.clear(); }

  // Appends the arrays of `value`, which must be as `spec` says.
  void read_nest(py::handle value, const SpecNest& spec, const Place& place,
                 std::vector<Array>* arrays) {
    const auto refuse = [&](const std::string& wanted) {
      throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                                  std::string(py::repr(py::type::of(value))) +
                                  ", not " + wanted);
    };
    if (spec.is_leaf()) {
      arrays->push_back(read(value, spec.leaf(), place));
    } else if (spec.is_vector()) {
      const auto& children = spec.vector();
      const bool is_list = PyList_Check(value.ptr());
      if (!is_list && !PyTuple_Check(value.ptr())) refuse("a tuple");
      const auto items = py::reinterpret_borrow<py::sequence>(value);
      if (items.size() != children.size()) {
        refuse("a tuple of " + std::to_string(children.size()) + ": it has " +
               std::to_string(items.size()));
      }
      for (size_t i = 0; i < children.size(); ++i) {
        const py::object item = items[i];
        read_nest(item, children[i], Place(place, i), arrays);
      }
    } else {
      if (!PyDict_Check(value.ptr())) refuse("a dict");
      for (const auto& [key, child] : spec.dict()) {
        const auto item = py::reinterpret_borrow<py::object>(
            PyDict_GetItemWithError(value.ptr(), py::str(key).ptr()));
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (!item) refuse("a dict with the key \"" + key + "\"");
        read_nest(item, child, Place(place, key), arrays);
      }
      const auto size = static_cast<size_t>(PyDict_Size(value.ptr()));
      if (size != spec.dict().size()) {
        refuse("a dict of " + std::to_string(spec.dict().size()) + ": it has " +
               std::to_string(size) + " keys");
      }
    }
  }

  // `to_bool`: integers may become bools.
  Array read(py::handle value, const ArraySpec& spec, const Place& place,
             bool to_bool = false) {
    const auto fits = [&](const py::array& array) {
      return has_dtype(array, spec.dtype) && (array.flags() & py::array::c_style) != 0;
    };
    const bool is_array = py::isinstance<py::array>(value);
    py::array array = is_array && fits(py::reinterpret_borrow<py::array>(value))
                          ? py::reinterpret_borrow<py::array>(value)
                          : cast(value, spec.dtype, place, to_bool);
    const Shape wanted = single_ ? spec.shape.tail() : spec.shape;
    if (!std::equal(wanted.begin(), wanted.end(), array.shape(),
                    array.shape() + array.ndim())) {
      throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                                  std::string(py::str(array.dtype())) + " " +
                                  std::string(py::str(py::list(array.attr("shape")))) +
                                  ", not " + ArraySpec{spec.dtype, wanted}.to_string());
    }
    auto* const data = static_cast<uint8_t*>(const_cast<void*>(array.data()));
    held_.push_back(std::move(array));
    return Array(spec, data, nullptr);
  }

 private:
  const bool single_;
  std::vector<py::object> held_;
};

// --- Environments --------------------------------------------------------------------

const std::string kObservation = "observation";
const std::string kFinalObservation = "final_observation";

// Calls f with the GIL; Python's exceptions, and values that don't fit, become text.
template <typename F>
auto with_python(F&& f) {
  WithGil gil;
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(error.what());
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) raise_later();
    throw std::runtime_error(describe(error));
  }
}

// Calls f. What does not fit in it can't get better.
template <typename F>
auto usable(F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    throw UnusableEnvironment(error.what());
  } catch (const py::error_already_set& error) {
    if (!error.matches(python_half("gym").attr("UnusableError"))) throw;
    throw UnusableEnvironment(py::str(error.value()));
  }
}

// initial() and step(actions) of E environments, which reset themselves, for a thread
// without the GIL. Made, used and destroyed in one thread.
class PythonEnvironment : public Environment {
 public:
  // `described`: the hello, as far as it does not come from the environment.
  explicit PythonEnvironment(const wire::EnvHello& described) : hello_(described) {}

  ~PythonEnvironment() override {
    gil_.emplace();  // until all members are gone
    const auto attempt = [this](auto&& f) {
      try {
        f();
      } catch (py::error_already_set& error) {
        if (error.matches(PyExc_KeyboardInterrupt)) return raise_later();
        error.discard_as_unraisable(env_);
      }
    };
    attempt([] { raise_signals(); });  // of Ctrl-C, not in the midst of close()
    attempt([&] {
      if (env_ && py::hasattr(env_, "close")) call(env_.attr("close"));
    });
  }

  // Makes the environment, and the hello as far as it is known before the first row.
  // What is thrown here, or later, does not keep the environment from being closed.
  void make(const Callback& env_class) {
    with_python([&] {
      usable([&] {
        const py::object env = env_class();
        thread_state_.emplace();
        const py::module_ gym = python_half("gym");
        env_ = gym.attr("adapt")(env);
        reader_.emplace(py::isinstance(env_, gym.attr("Single")));
        initial_ = env_.attr("initial");
        step_ = env_.attr("step");
        add_json(gym.attr("begin_hello")(env_), &hello_);
      });
    });
  }

  const wire::EnvHello& hello() const override { return hello_; }

  void seed(const wire::Seeding& seeding) override {
    with_python([&] {
      if (!py::hasattr(env_, "begin_stream")) return;
      const py::tuple arguments = py::make_tuple(seeding.seed(), seeding.stream());
      call(env_.attr("begin_stream"), arguments);
    });
  }

  EnvRow reset() override {
    return with_python([&] {
      py::object row = call(initial_);
      if (fields_.empty()) usable([&] { finish_hello(row); });
      return make_row(std::move(row));
    });
  }

  EnvRow step(const std::vector<Array>& action) override {
    return with_python([&] {
      size_t next = 0;
      const auto take_next = [&](const ArraySpec&) {
        return copy_to_numpy(action.at(next++));
      };
      const py::object actions = hello_.has_action_space()
                                     ? nest::to_python(spec_.action, take_next)
                                     : copy_to_numpy(action.at(0));
      return make_row(call(step_, py::make_tuple(actions)));
    });
  }

 private:
  struct Field {
    std::string name;
    py::object key;  // the name as Python's string
    ArraySpec spec;
  };

  static void check_row(py::handle row) {
    if (!PyDict_Check(row.ptr())) {
      throw std::invalid_argument("initial() and step() must return a dict, not " +
                                  std::string(py::repr(py::type::of(row))));
    }
  }

  void finish_hello(const py::object& row) {
    check_row(row);
    add_json(python_half("gym").attr("finish_hello")(env_, row), &hello_);
    spec_ = StreamSpec(hello_);
    for (size_t i = spec_.num_observation_arrays; i < spec_.arrays.size(); ++i) {
      fields_.push_back({spec_.names[i], py::str(spec_.names[i]), spec_.arrays[i]});
    }
  }

  static py::object item(py::handle row, const std::string& name, py::handle key) {
    auto value = py::reinterpret_borrow<py::object>(
        PyDict_GetItemWithError(row.ptr(), key.ptr()));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (!value) throw std::invalid_argument("the row has no \"" + name + "\"");
    return value;
  }

  EnvRow make_row(py::object row) {
    static const Place root;
    static const Place final_place(root, kFinalObservation);
    static PyObject* const key = PyUnicode_InternFromString(kObservation.c_str());
    check_row(row);
    reader_->clear();
    EnvRow result;
    result.arrays.reserve(spec_.arrays.size());
    const py::object observation = item(row, kObservation, key);
    reader_->read_nest(observation, spec_.observation, Place(root, kObservation),
                       &result.arrays);
    for (const Field& field : fields_) {
      const py::object value = item(row, field.name, field.key);
      result.arrays.push_back(reader_->read(value, field.spec, Place(root, field.name),
                                            field.spec.dtype == DType::kBool));
    }
    const auto size = static_cast<size_t>(PyDict_Size(row.ptr()));
    if (size != fields_.size() + 1) {
      throw std::invalid_argument(
          "the row has " + std::to_string(size) + " fields, the first had " +
          std::to_string(fields_.size() + 1) + "; all rows must have the same");
    }
    row_ = std::move(row);
    if (any_truncated(spec_, result.arrays)) {
      py::object last = py::getattr(env_, kFinalObservation.c_str(), py::none());
      if (last.is_none()) {
        throw std::invalid_argument(
            "an episode was truncated, and final_observation is None; it must hold the "
            "last observations, nested [E, ...]");
      }
      reader_->read_nest(last, spec_.observation, final_place,
                         &result.final_observation);
      final_observation_ = std::move(last);
    }
    return result;
  }

  std::optional<WithGil> gil_;  // the last to go
  std::optional<ThreadState> thread_state_;
  py::object env_;
  py::object initial_;
  py::object step_;
  wire::EnvHello hello_;
  StreamSpec spec_;  // from reset() on
  py::object row_;   // these keep the last row's memory
  py::object final_observation_;
  std::optional<RowReader> reader_;
  std::vector<Field> fields_;  // behind the observation
};

}  // namespace

EnvironmentFactory environment_factory(std::shared_ptr<Callback> env_class,
                                       std::string name, const Settings& settings) {
  wire::EnvHello described;
  described.set_version(kWireVersion);
  described.set_environment(std::move(name));
  for (const auto& [flag, value] : settings) {
    wire::Setting* setting = described.add_settings();
    setting->set_name(flag);
    setting->set_value(value);
  }
  return [env_class = std::move(env_class), described = std::move(described)] {
    auto made = std::make_unique<PythonEnvironment>(described);
    made->make(*env_class);
    return made;
  };
}

}  // namespace torchbeast::python
