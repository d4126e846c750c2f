// Spaces of Gymnasium and the old gym as those of the wire, and as plain dicts.
//
// They are recognized by the names of their classes: neither package is imported here.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../array.h"
#include "torchbeast.pb.h"

namespace torchbeast::python {

namespace py = pybind11;

// What an environment observes in `space`, or what a policy writes to act in it:
// integers that count from 0 whatever the space's start, and floats that are float32.
// Throws std::invalid_argument, naming the place, on a space that is none of Box,
// Discrete, MultiDiscrete, MultiBinary, Tuple and Dict.
wire::Space observation_space(py::handle space);
wire::Space action_space(py::handle space);

// The space of an observation, if the environment has none: a Box without
// bounds for every array or number.
wire::Space space_of_observation(py::handle observation);

// What the policy wrote, [1, ...] each, as an environment with this action space wants
// it; `kind` is action_space(space). Integers get the space's start, floats are clipped
// into its bounds: as torchbeast.envs.environment does. An int for Discrete, else a
// NumPy array of the space's dtype. Throws std::invalid_argument if an integer is out
// of range.
py::object action_to_python(const wire::Space& kind, py::handle space,
                            const std::vector<Array>& arrays);

// {"type": "Discrete", "n": 6, "start": 0} and so on, see probe's docstring.
py::object space_to_python(const wire::Space& space);

}  // namespace torchbeast::python
