#include "row_reader.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "arrays.h"
#include "bindings.h"

namespace torchbeast::python {

using nest::Place;

// The values as a C-contiguous array of `dtype`, see cast() of libtorchbeast_gym.py.
py::array RowReader::cast(py::handle value, DType dtype, const Place& place,
                          bool to_bool) {
  const py::object found =
      python_half("gym").attr("cast")(value, to_numpy(dtype), to_bool);
  if (!py::isinstance<py::str>(found)) return py::cast<py::array>(found);
  throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                              std::string(py::str(found)));
}

Array RowReader::read(py::handle value, const ArraySpec& spec, const Place& place,
                      bool to_bool) {
  const auto fits = [&](const py::array& array) {
    return has_dtype(array, spec.dtype) && (array.flags() & py::array::c_style) != 0;
  };
  const bool is_array = py::isinstance<py::array>(value);
  py::array array = is_array && fits(py::reinterpret_borrow<py::array>(value))
                        ? py::reinterpret_borrow<py::array>(value)
                        : cast(value, spec.dtype, place, to_bool);
  const Shape wanted = single_ ? spec.shape.tail() : spec.shape;
  if (!std::equal(wanted.begin(), wanted.end(), array.shape(),
                  array.shape() + array.ndim())) {
    throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                                std::string(py::str(array.dtype())) + " " +
                                std::string(py::str(py::list(array.attr("shape")))) +
                                ", not " + ArraySpec{spec.dtype, wanted}.to_string());
  }
  auto* const data = static_cast<uint8_t*>(const_cast<void*>(array.data()));
  held_.push_back(std::move(array));
  return Array(spec, data, nullptr);
}

void RowReader::read_nest(py::handle value, const SpecNest& spec, const Place& place,
                          std::vector<Array>* arrays) {
  const auto refuse = [&](const std::string& wanted) {
    throw std::invalid_argument("at " + place.str() + ": the environment gave " +
                                std::string(py::repr(py::type::of(value))) + ", not " +
                                wanted);
  };
  if (spec.is_leaf()) {
    arrays->push_back(read(value, spec.leaf(), place));
  } else if (spec.is_vector()) {
    const auto& children = spec.vector();
    const bool is_list = PyList_Check(value.ptr());
    if (!is_list && !PyTuple_Check(value.ptr())) refuse("a tuple");
    const auto items = py::reinterpret_borrow<py::sequence>(value);
    if (items.size() != children.size()) {
      refuse("a tuple of " + std::to_string(children.size()) + ": it has " +
             std::to_string(items.size()));
    }
    for (size_t i = 0; i < children.size(); ++i) {
      const py::object item = items[i];
      read_nest(item, children[i], Place(place, i), arrays);
    }
  } else {
    if (!PyDict_Check(value.ptr())) refuse("a dict");
    for (const auto& [key, child] : spec.dict()) {
      const auto item = py::reinterpret_borrow<py::object>(
          PyDict_GetItemWithError(value.ptr(), py::str(key).ptr()));
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (!item) refuse("a dict with the key \"" + key + "\"");
      read_nest(item, child, Place(place, key), arrays);
    }
    const auto size = static_cast<size_t>(PyDict_Size(value.ptr()));
    if (size != spec.dict().size()) {
      refuse("a dict of " + std::to_string(spec.dict().size()) + ": it has " +
             std::to_string(size) + " keys");
    }
  }
}

}  // namespace torchbeast::python
