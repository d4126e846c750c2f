#include "spaces.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "arrays.h"
#include "nest/pybind.h"

namespace torchbeast::python {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of more elements than this, a hello has one bound for all, the outermost.
constexpr py::ssize_t kMaxBounds = 65536;

py::module_ numpy() { return py::module_::import("numpy"); }

// Which of the spaces it is, or derives from.
std::string kind_of(py::handle space, const nest::Place& place) {
  for (py::handle type : py::type::of(space).attr("__mro__")) {
    const auto name = py::cast<std::string>(type.attr("__name__"));
    for (const char* known :
         {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Tuple", "Dict"}) {
      if (name == known) return name;
    }
  }
  throw std::invalid_argument(
      "at " + place.str() + ": the space " + std::string(py::str(space)) +
      " is none of Box, Discrete, MultiDiscrete, MultiBinary, and Tuple and Dict of "
      "those. Wrap the environment so that it has such a space");
}

DType dtype_of(const py::array& array, const nest::Place& place) {
  const std::optional<DType> dtype = from_numpy(array);
  if (!dtype) {
    throw std::invalid_argument(
        "at " + place.str() + ": the dtype " + std::string(py::str(array.dtype())) +
        " cannot be sent; bool, and the usual integers and floats "
        "of native byte order can");
  }
  return *dtype;
}

// Adds the values to `field`: none if all are `none`, one if all are equal or if there
// are too many. `none` is the infinity that means no bound.
template <typename Field>
void add_bounds(py::handle values, double none, Field* field) {
  const py::object np = numpy();
  const auto bounds = py::cast<py::array_t<double, py::array::c_style>>(
      np.attr("asarray")(values, "float64"));
  const double* const begin = bounds.data();
  const double* const end = begin + bounds.size();
  if (begin == end || std::all_of(begin, end, [&](double x) { return x == none; })) {
    return;
  }
  if (std::all_of(begin, end, [&](double x) { return x == *begin; })) {
    field->Add(*begin);
  } else if (bounds.size() <= kMaxBounds) {
    field->Add(begin, end);
  } else {
    const double outer =
        none < 0 ? *std::min_element(begin, end) : *std::max_element(begin, end);
    if (outer != none) field->Add(outer);
  }
}

template <typename Field>
void add_shape(py::handle shape, Field* field) {
  for (py::handle dim : shape) field->Add(py::cast<uint64_t>(dim));
}

// Calls f(key, child, place of the child) for the spaces of a Tuple or Dict, these in
// any order. `key` is empty for a Tuple.
template <typename F>
void for_each_child(py::handle space, const nest::Place& place, F&& f) {
  const py::object children = space.attr("spaces");
  if (py::isinstance<py::list>(children) || py::isinstance<py::tuple>(children)) {
    size_t i = 0;
    for (py::handle child : children) {
      f(std::string(), child, nest::Place(place, i++));
    }
    return;
  }
  for (py::handle item : children.attr("items")()) {
    const auto [key, child] = py::cast<std::pair<py::object, py::object>>(item);
    const std::string name = nest::internal::key_from_python(key, place);
    f(name, child, nest::Place(place, name));
  }
}

std::vector<int64_t> integers(py::handle values) {
  const py::object flat = numpy().attr("ravel")(values).attr("tolist")();
  return py::cast<std::vector<int64_t>>(flat);
}

wire::Space convert(py::handle space, const nest::Place& place, bool is_action) {
  if (place.depth() > nest::kMaxDepth) {
    throw nest::StructureError("spaces are nested too deeply");
  }
  const std::string kind = kind_of(space, place);
  wire::Space result;
  if (kind == "Box") {
    wire::Space::Box* box = result.mutable_box();
    const py::array example = numpy().attr("zeros")(0, space.attr("dtype"));
    DType dtype = dtype_of(example, place);
    if (is_action && example.dtype().kind() == 'f') dtype = DType::kFloat32;
    box->set_dtype(static_cast<wire::DType>(dtype));
    add_shape(space.attr("shape"), box->mutable_shape());
    add_bounds(space.attr("low"), -kInfinity, box->mutable_low());
    add_bounds(space.attr("high"), kInfinity, box->mutable_high());
  } else if (kind == "Discrete") {
    result.mutable_discrete()->set_n(py::cast<int64_t>(space.attr("n")));
    result.mutable_discrete()->set_start(
        py::cast<int64_t>(py::getattr(space, "start", py::int_(0))));
  } else if (kind == "MultiDiscrete") {
    const py::object nvec = space.attr("nvec");
    if (py::cast<int>(nvec.attr("ndim")) != 1) {
      throw std::invalid_argument(
          "at " + place.str() + ": a MultiDiscrete with more than one dimension, " +
          std::string(py::str(space)) + ". Wrap the environment to make it flat");
    }
    wire::Space::MultiDiscrete* multi = result.mutable_multi_discrete();
    for (int64_t n : integers(nvec)) multi->add_n(n);
    if (py::hasattr(space, "start")) {
      for (int64_t start : integers(space.attr("start"))) multi->add_start(start);
    }
  } else if (kind == "MultiBinary") {
    add_shape(space.attr("shape"), result.mutable_multi_binary()->mutable_shape());
  } else if (kind == "Tuple") {
    wire::Space::Tuple* tuple = result.mutable_tuple();
    for_each_child(space, place,
                   [&](const std::string&, py::handle child, const nest::Place& at) {
                     *tuple->add_items() = convert(child, at, is_action);
                   });
  } else {
    wire::Space::Dict* dict = result.mutable_dict();
    for_each_child(
        space, place,
        [&](const std::string& key, py::handle child, const nest::Place& at) {
          dict->add_keys(key);
          *dict->add_values() = convert(child, at, is_action);
        });
  }
  return result;
}

wire::Space to_space(const nest::Nest<ArraySpec>& nest) {
  wire::Space space;
  if (nest.is_leaf()) {
    wire::Space::Box* box = space.mutable_box();
    box->set_dtype(static_cast<wire::DType>(nest.leaf().dtype));
    for (int64_t dim : nest.leaf().shape) box->add_shape(static_cast<uint64_t>(dim));
  } else if (nest.is_vector()) {
    wire::Space::Tuple* tuple = space.mutable_tuple();
    for (const auto& child : nest.vector()) *tuple->add_items() = to_space(child);
  } else {
    wire::Space::Dict* dict = space.mutable_dict();
    for (const auto& [key, child] : nest.dict()) {
      dict->add_keys(key);
      *dict->add_values() = to_space(child);
    }
  }
  return space;
}

template <typename Field>
py::tuple to_tuple(const Field& field) {
  py::tuple result(field.size());
  for (int i = 0; i < field.size(); ++i) result[static_cast<size_t>(i)] = field.Get(i);
  return result;
}

template <typename Field>
py::object bounds_to_python(const Field& bounds, const py::tuple& shape) {
  if (bounds.empty()) return py::none();
  if (bounds.size() == 1) return py::float_(bounds.Get(0));
  return numpy().attr("array")(to_tuple(bounds)).attr("reshape")(shape);
}

// Throws unless each choice is below its n.
void check_choices(const Array& choices, const std::vector<int64_t>& n,
                   py::handle space) {
  for (size_t i = 0; i < n.size(); ++i) {
    const int64_t value = choices.as<int64_t>()[i];
    if (value >= 0 && value < n[i]) continue;
    throw std::invalid_argument(
        "the action " + std::to_string(value) + " is out of range, allowed are 0 to " +
        std::to_string(n[i] - 1) + " for " + std::string(py::str(space)));
  }
}

// Reads the arrays from *next on, in their order, which is that of a Dict's keys.
py::object to_python(const wire::Space& kind, py::handle space,
                     std::vector<Array>::const_iterator* next) {
  if (kind.has_tuple()) {
    const py::sequence children = space.attr("spaces");
    py::tuple result(children.size());
    for (size_t i = 0; i < children.size(); ++i) {
      result[i] = to_python(kind.tuple().items(static_cast<int>(i)),
                            py::object(children[i]), next);
    }
    return std::move(result);
  }
  if (kind.has_dict()) {
    std::map<std::string, const wire::Space*> children;
    for (int i = 0; i < kind.dict().keys_size(); ++i) {
      children.emplace(kind.dict().keys(i), &kind.dict().values(i));
    }
    const py::object spaces = space.attr("spaces");
    py::dict result;
    for (const auto& [key, child] : children) {
      result[py::str(key)] = to_python(*child, spaces[py::str(key)], next);
    }
    return std::move(result);
  }
  const Array& array = *(*next)++;
  if (kind.has_discrete()) {
    check_choices(array, {kind.discrete().n()}, space);
    return py::int_(array.as<int64_t>()[0] + kind.discrete().start());
  }
  py::object values = copy_to_numpy(array.at(0));
  if (kind.has_multi_binary()) return values;
  if (kind.has_multi_discrete()) {
    const auto& multi = kind.multi_discrete();
    check_choices(array, {multi.n().begin(), multi.n().end()}, space);
    if (!multi.start().empty())
      values = values + numpy().attr("array")(to_tuple(multi.start()));
  } else if (array.dtype() == DType::kFloat32) {
    values = numpy().attr("clip")(values, space.attr("low"), space.attr("high"));
  }
  return numpy().attr("asarray")(values, space.attr("dtype"));
}

}  // namespace

wire::Space observation_space(py::handle space) {
  return convert(space, nest::Place(), false);
}

wire::Space action_space(py::handle space) {
  return convert(space, nest::Place(), true);
}

wire::Space space_of_observation(py::handle observation) {
  const py::object asarray = numpy().attr("asarray");
  return to_space(nest::from_python<ArraySpec>(
      observation, [&](py::handle leaf, const nest::Place& place) {
        const py::array array = asarray(leaf);
        return ArraySpec{dtype_of(array, place), shape_of(array)};
      }));
}

py::object action_to_python(const wire::Space& kind, py::handle space,
                            const std::vector<Array>& arrays) {
  auto next = arrays.begin();
  return to_python(kind, space, &next);
}

py::object space_to_python(const wire::Space& space) {
  using namespace py::literals;
  switch (space.kind_case()) {
    case wire::Space::kBox: {
      const py::tuple shape = to_tuple(space.box().shape());
      return py::dict("type"_a = "Box",
                      "dtype"_a = dtype_name(static_cast<DType>(space.box().dtype())),
                      "shape"_a = shape,
                      "low"_a = bounds_to_python(space.box().low(), shape),
                      "high"_a = bounds_to_python(space.box().high(), shape));
    }
    case wire::Space::kDiscrete:
      return py::dict("type"_a = "Discrete", "n"_a = space.discrete().n(),
                      "start"_a = space.discrete().start());
    case wire::Space::kMultiDiscrete: {
      auto start = space.multi_discrete().start();
      start.Resize(space.multi_discrete().n_size(), 0);
      return py::dict("type"_a = "MultiDiscrete",
                      "n"_a = to_tuple(space.multi_discrete().n()),
                      "start"_a = to_tuple(start));
    }
    case wire::Space::kMultiBinary:
      return py::dict("type"_a = "MultiBinary",
                      "shape"_a = to_tuple(space.multi_binary().shape()));
    case wire::Space::kTuple: {
      py::list items;
      for (const wire::Space& child : space.tuple().items()) {
        items.append(space_to_python(child));
      }
      return py::dict("type"_a = "Tuple", "spaces"_a = py::tuple(items));
    }
    case wire::Space::kDict: {
      py::dict items;
      for (int i = 0; i < space.dict().keys_size(); ++i) {
        items[py::str(space.dict().keys(i))] = space_to_python(space.dict().values(i));
      }
      return py::dict("type"_a = "Dict", "spaces"_a = items);
    }
    case wire::Space::KIND_NOT_SET:
      break;
  }
  return py::none();
}

}  // namespace torchbeast::python
