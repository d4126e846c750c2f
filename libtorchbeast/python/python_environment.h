// Environments written in Python, for servers and clients.

#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "../environment.h"

namespace torchbeast::python {

namespace py = pybind11;

// A factory that calls env_class() for each stream. What Server's docstring says about
// environments is what it does. The hello gets the name `name`.
// REQUIRES: the GIL is held. The factory and its environments take it themselves.
EnvironmentFactory environment_factory(py::object env_class, std::string name);

}  // namespace torchbeast::python
