// Arrays of NumPy and torch as arrays of the core, and back.
//
// Going in, C-contiguous memory is shared: the core holds a reference to the Python
// object. A write before the core is done with it changes what the core sees. Other
// strides, foreign byte orders and read-only memory are copied (what comes out again
// can be written to).
//
// Coming out, memory is always shared: a torch tensor if torch is imported, else a
// NumPy array.
//
// torch is never imported here, and NumPy only when the first array comes by.
// REQUIRES, everywhere in this file: the GIL is held.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "../array.h"
#include "gil.h"

namespace torchbeast::python {

namespace py = pybind11;

// Loads what the functions below need of NumPy. They do so themselves, but then let
// other threads run in between, and a thread that wants to block soon after might not
// come back if the interpreter ends meanwhile.
void load_numpy();

// Throw, naming the place in the nest, py::type_error on a leaf that is not an array,
// std::invalid_argument on one that the core does not support: on another device than
// the CPU, of another dtype, with too many dimensions.
ArrayNest nest_from_python(py::handle nest);
// Tuples and dicts.
py::object nest_to_python(const ArrayNest& nest);

// Memory from a Python function of the number of bytes, see BatchingQueue's docstring.
MemoryPool::Allocator allocator_from_python(std::shared_ptr<Callback> function);

// --- NumPy ---------------------------------------------------------------------------

// The NumPy dtype of that name.
const py::dtype& to_numpy(DType dtype);
// Whether it has this dtype.
bool has_dtype(const py::array& array, DType dtype);
// Nothing for dtypes that the core has not, foreign byte orders included.
std::optional<DType> from_numpy(const py::array& array);

// A new NumPy array with this memory.
py::array to_numpy(const Array& array);
// One with memory of its own, which an environment may keep.
py::array copy_to_numpy(const Array& array);

}  // namespace torchbeast::python
