#include "python_environment.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.h"
#include "gil.h"
#include "nest/pybind.h"
#include "row_reader.h"
#include "spaces.h"

namespace torchbeast::python {
namespace {

using nest::Place;

// The exception as Python prints it, with its traceback.
std::string describe(const py::error_already_set& error) {
  try {
    // An exception that C code raised has no traceback.
    const py::object trace = error.trace() ? error.trace() : py::none();
    const py::object lines =
        py::module_::import("traceback")
            .attr("format_exception")(error.type(), error.value(), trace);
    return py::cast<std::string>(py::str("").attr("join")(lines));
  } catch (const std::exception&) {
    return error.what();
  }
}

// Keeps Python's state of this thread, and so the variables that Python code keeps per
// thread. Without it every step would make a new one. REQUIRES, of both: the GIL is
// held.
class ThreadState {
 public:
  ThreadState() : state_(PyGILState_Ensure()) {}
  ~ThreadState() {
    if (std::this_thread::get_id() == thread_) PyGILState_Release(state_);
  }
  ThreadState(const ThreadState&) = delete;

 private:
  const PyGILState_STATE state_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

// --- Environments --------------------------------------------------------------------

const std::string kObservation = "observation";
const std::string kReward = "reward";
const std::string kDone = "done";
const std::string kEpisodeStep = "episode_step";
const std::string kEpisodeReturn = "episode_return";
const std::string kTruncated = "truncated";
const std::string kFinalObservation = "final_observation";
constexpr char kBeginStream[] = "begin_stream";

// Calls f. What does not fit in it can't get better.
template <typename F>
auto usable(F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    throw UnusableEnvironment(error.what());
  } catch (const py::error_already_set& error) {
    if (!error.matches(gym_module().attr("UnusableError"))) throw;
    throw UnusableEnvironment(py::str(error.value()));
  }
}

// initial() and step(actions) of E environments, which reset themselves; E = 1 and
// `single` are a Single of libtorchbeast_gym.py. REQUIRES, of all: the GIL is held.
class PythonEnvironment : public Environment {
 public:
  // `described`: the hello, as far as it does not come from the environment.
  PythonEnvironment(py::object env, bool single, const wire::EnvHello& described)
      : env_(std::move(env)),
        single_(single),
        initial_(env_.attr("initial")),
        step_(env_.attr("step")),
        hello_(described),
        reader_(single) {}

  ~PythonEnvironment() override {
    try {
      if (py::hasattr(env_, "close")) call(env_.attr("close"));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(env_);
    }
  }

  // Adds to the hello what is known before the first row. What is thrown here, or
  // later, does not keep the environment from being closed.
  void begin_hello() {
    const auto num_envs = py::cast<int64_t>(env_.attr("num_envs"));
    if (num_envs < 1 || num_envs > kMaxEnvs) {
      throw std::invalid_argument("num_envs must be 1 to " + std::to_string(kMaxEnvs) +
                                  ", not " + std::to_string(num_envs));
    }
    hello_.set_num_envs(static_cast<uint32_t>(num_envs));
    const py::object action_space = py::getattr(env_, "action_space", py::none());
    if (!action_space.is_none()) {
      *hello_.mutable_action_space() = space_from_python(action_space, true);
    } else if (!single_) {
      throw std::invalid_argument(
          "the environment " + std::string(py::repr(env_)) +
          " has no action_space. Give it one, such as gymnasium.spaces.Discrete(n), so "
          "that the learner knows what actions to send");
    }
    const py::object space = env_.attr("observation_space");
    if (space.is_none() && single_) return;  // the first observation shows it
    *hello_.mutable_observation_space() = space_from_python(space, false);
  }

  const wire::EnvHello& hello() const override { return hello_; }

  void seed(const wire::Seeding& seeding) override {
    if (!py::hasattr(env_, kBeginStream)) return;
    call(env_.attr(kBeginStream), py::make_tuple(seeding.seed(), seeding.stream()));
  }

  EnvRow reset() override {
    py::object row = call(initial_);
    if (fields_.empty()) usable([&] { begin(row); });
    return make_row(std::move(row));
  }

  EnvRow step(const std::vector<Array>& action) override {
    size_t next = 0;
    const py::object actions =
        hello_.has_action_space()
            ? nest::to_python(
                  spec_.action,
                  [&](const ArraySpec&) { return copy_to_numpy(action.at(next++)); })
            : copy_to_numpy(action.at(0));
    return make_row(call(step_, py::make_tuple(actions)));
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

  // Completes the hello with what the first row tells.
  void begin(py::handle row) {
    check_row(row);
    if (!hello_.has_observation_space()) {
      *hello_.mutable_observation_space() =
          space_of_observation(item(row, kObservation, py::str(kObservation)));
    }
    std::vector<std::string> extra;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(row)) {
      const std::string name = nest::internal::key_from_python(key, Place());
      if (name != kObservation && name != kReward && name != kDone &&
          name != kEpisodeStep && name != kEpisodeReturn) {
        extra.push_back(name);
      }
    }
    std::sort(extra.begin(), extra.end());
    for (const std::string& name : extra) {
      const Place root;
      const Place place(root, name);
      const py::array value =
          py::module_::import("numpy").attr("asarray")(row[py::str(name)]);
      const std::optional<DType> dtype = from_numpy(value);
      if (!dtype) {
        throw std::invalid_argument("at " + place.str() + ": an extra field of dtype " +
                                    std::string(py::str(value.dtype())) +
                                    " cannot be sent");
      }
      if (value.ndim() == 0 || value.shape(0) != hello_.num_envs()) {
        throw std::invalid_argument(
            "at " + place.str() + ": the environment gave " + describe_array(value) +
            ", but every field has the num_envs, " + std::to_string(hello_.num_envs()) +
            ", as its first dimension");
      }
      wire::Field* field = hello_.add_extra_fields();
      field->set_name(name);
      field->set_dtype(
          static_cast<wire::DType>(name == kTruncated ? DType::kBool : *dtype));
      for (py::ssize_t i = 1; i < value.ndim(); ++i) {
        field->add_shape(static_cast<uint64_t>(value.shape(i)));
      }
    }
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
    check_row(row);
    reader_.clear();
    EnvRow result;
    result.arrays.reserve(spec_.arrays.size());
    const py::object observation = item(row, kObservation, py::str(kObservation));
    reader_.read_nest(observation, spec_.observation, Place(root, kObservation),
                      &result.arrays);
    for (const Field& field : fields_) {
      const py::object value = item(row, field.name, field.key);
      result.arrays.push_back(reader_.read(value, field.spec, Place(root, field.name),
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
      reader_.read_nest(last, spec_.observation, final_place,
                        &result.final_observation);
      final_observation_ = std::move(last);
    }
    return result;
  }

  const py::object env_;
  const bool single_;
  const py::object initial_;
  const py::object step_;
  wire::EnvHello hello_;
  StreamSpec spec_;  // from reset() on
  py::object row_;   // these keep the last row's memory
  py::object final_observation_;
  RowReader reader_;
  std::vector<Field> fields_;  // behind the observation
};

std::unique_ptr<Environment> adapt(py::handle env, const wire::EnvHello& described) {
  py::object adapted = gym_module().attr("adapt")(env);
  const bool single = py::isinstance(adapted, gym_module().attr("Single"));
  auto made =
      std::make_unique<PythonEnvironment>(std::move(adapted), single, described);
  made->begin_hello();
  return made;
}

// Calls f with the GIL; Python's exceptions become text.
template <typename F>
auto with_python(F&& f) {
  WithGil gil;
  try {
    return f();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(describe(error));
  }
}

// For a thread without the GIL: takes it in each call. Made, used and destroyed in one
// thread.
class GuardedEnvironment : public Environment {
 public:
  GuardedEnvironment(py::handle env_class, const wire::EnvHello& described) {
    with_python([&] {
      const py::object env = call(env_class);
      environment_ = usable([&] { return adapt(env, described); });
      thread_state_.emplace();
    });
  }
  ~GuardedEnvironment() override {
    WithGil gil;
    environment_ = nullptr;
    thread_state_.reset();
  }

  const wire::EnvHello& hello() const override { return environment_->hello(); }
  void seed(const wire::Seeding& seeding) override {
    with_python([&] { environment_->seed(seeding); });
  }
  EnvRow reset() override {
    return with_python([&] { return environment_->reset(); });
  }
  EnvRow step(const std::vector<Array>& action) override {
    return with_python([&] { return environment_->step(action); });
  }

 private:
  std::unique_ptr<Environment> environment_;
  std::optional<ThreadState> thread_state_;
};

}  // namespace

EnvironmentFactory environment_factory(py::object env_class, std::string name,
                                       const Settings& settings) {
  if (PyCallable_Check(env_class.ptr()) == 0) {
    throw py::type_error(
        "env_class must be a class or function without arguments, not " +
        std::string(py::repr(env_class)));
  }
  const std::shared_ptr<void> kept = keep(std::move(env_class));
  wire::EnvHello described;
  described.set_version(kWireVersion);
  described.set_environment(std::move(name));
  for (const auto& [flag, value] : settings) {
    wire::Setting* setting = described.add_settings();
    setting->set_name(flag);
    setting->set_value(value);
  }
  return [kept, described = std::move(described)] {
    return std::make_unique<GuardedEnvironment>(static_cast<PyObject*>(kept.get()),
                                                described);
  };
}

}  // namespace torchbeast::python
