// Spaces of Gymnasium and the old gym as those of the wire, and as plain dicts. Python
// does the work, see libtorchbeast_gym.py.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include "torchbeast.pb.h"

namespace torchbeast::python {

namespace py = pybind11;

py::module_ gym_module();  // libtorchbeast_gym

// As space_to_json() and observation_to_json(), which throw; std::invalid_argument if
// the wire can't have the space.
wire::Space space_from_python(py::handle space, bool is_action);
wire::Space space_of_observation(py::handle observation);

// As space_from_json().
py::object space_to_python(const wire::Space& space);

}  // namespace torchbeast::python
