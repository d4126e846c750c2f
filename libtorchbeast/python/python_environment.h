// Environments written in Python, for servers and clients.

#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <string>

#include "../environment.h"
#include "gil.h"

namespace torchbeast::python {

namespace py = pybind11;

using Settings = std::map<std::string, std::string>;

// A factory that calls env_class for each stream. What Server's docstring says about
// environments is what it does. The hello gets the name and the settings.
// REQUIRES: the GIL is held. The factory and its environments take it themselves.
EnvironmentFactory environment_factory(std::shared_ptr<Callback> env_class,
                                       std::string name, const Settings& settings);

}  // namespace torchbeast::python
