// From the values of Python environments to the rows of the wire.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "../array.h"
#include "nest/nest.h"

namespace torchbeast::python {

namespace py = pybind11;

// Reads values into arrays that share their memory if dtype and layout allow it. Throws
// std::invalid_argument, which names the place. One thread at a time.
class RowReader {
 public:
  // `single`: values are of one environment, and the arrays' first dimension is 1.
  explicit RowReader(bool single) : single_(single) {}

  // Forgets what keeps the arrays of the last row alive.
  void clear() { held_.clear(); }

  // Appends the arrays of `value`, which must be as `spec` says.
  void read_nest(py::handle value, const SpecNest& spec, const nest::Place& place,
                 std::vector<Array>* arrays);
  // `to_bool`: integers may become bools.
  Array read(py::handle value, const ArraySpec& spec, const nest::Place& place,
             bool to_bool = false);

 private:
  static py::array cast(py::handle value, DType dtype, const nest::Place& place,
                        bool to_bool);

  const bool single_;
  std::vector<py::object> held_;
};

}  // namespace torchbeast::python
