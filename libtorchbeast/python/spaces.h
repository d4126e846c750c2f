// Spaces of Gymnasium and the old gym as those of the wire, and as plain dicts.
//
// They are told by the names of their classes: neither package is imported here.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../array.h"
#include "nest/nest.h"
#include "torchbeast.pb.h"

namespace torchbeast::python {

namespace py = pybind11;

// The observation space `space`. Throws std::invalid_argument, naming the place, on one
// that is none of Box, Discrete, MultiDiscrete, MultiBinary, Tuple and Dict.
wire::Space observation_space(py::handle space);

// The space of an observation, if the environment has none: a Box without
// bounds for every array or number.
wire::Space space_of_observation(py::handle observation);

// The space of what a policy writes to act in `space`: its integers count from 0
// whatever the space's start, its floats are float32. Throws as observation_space.
wire::Space action_space(py::handle space);

// What the policy wrote, one array of the action, as an environment wants it.
class ActionLeaf {
 public:
  // Of a Box, Discrete, MultiDiscrete or MultiBinary.
  explicit ActionLeaf(py::handle space);

  // `array` is [1, ...]. Integers get the space's start, floats are clipped into its
  // bounds: as torchbeast.core.environment does. An int for Discrete, else a NumPy
  // array of the space's dtype. Throws std::invalid_argument if an integer is out of
  // range.
  py::object to_python(const Array& array) const;

 private:
  enum Kind { kBox, kDiscrete, kMultiDiscrete, kMultiBinary };
  Kind kind_;
  std::vector<int64_t> n_;
  std::vector<int64_t> start_;
  py::object space_;
};
using ActionNest = nest::Nest<ActionLeaf>;
ActionNest action_nest(py::handle space);

// {"type": "Discrete", "n": 6, "start": 0} and so on, see probe's docstring.
py::object space_to_python(const wire::Space& space);

}  // namespace torchbeast::python
