// Hellos and spaces as JSON, which libtorchbeast_gym.py writes and reads.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/pybind11.h>

#include "torchbeast.pb.h"

namespace torchbeast::python {

namespace py = pybind11;

py::module_ gym_module();  // libtorchbeast_gym

// Adds what begin_hello() or finish_hello() returns. Throws std::invalid_argument if
// the wire can't have it.
void add_json(const py::object& json, wire::EnvHello* hello);

// As space_from_json().
py::object space_to_python(const wire::Space& space);

}  // namespace torchbeast::python
