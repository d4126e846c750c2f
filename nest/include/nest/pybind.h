// Between Python's tuples, lists and dicts and nest::Nest.
//
// Structure is what is a tuple, list or dict, or an instance of a subclass. All
// else is a leaf: arrays, strings, None, sets and other mappings, too.
// REQUIRES, of both functions: the GIL is held.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "nest/nest.h"

namespace nest {

// A list that contains itself must end in an error, and far from the end of the
// stack.
constexpr size_t kMaxDepth = 64;

namespace internal {

// A str as UTF-8, whose order by bytes is Python's order of str.
inline std::string key_from_python(pybind11::handle key, const Place& place) {
  if (!PyUnicode_Check(key.ptr())) {
    throw pybind11::type_error(
        "at " + place.str() + ": the keys of a dict must be str, not " +
        std::string(pybind11::repr(key)) + " (" + Py_TYPE(key.ptr())->tp_name + ")");
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
  if (text == nullptr) throw pybind11::error_already_set();
  return std::string(text, size);
}

}  // namespace internal

// The nest of leaf_from_python(handle object, const Place& place) -> T for each
// leaf. In the errors of leaf_from_python, place.str() tells which leaf it is.
//
// Throws StructureError (ValueError in Python) for more than kMaxDepth
// containers inside one another, type_error for a dict key that is not a str,
// and whatever leaf_from_python throws.
template <typename T, typename F>
Nest<T> from_python(pybind11::handle object, F&& leaf_from_python,
                    const Place& place = Place()) {
  namespace py = pybind11;
  const bool is_list = PyList_Check(object.ptr());
  const bool is_dict = PyDict_Check(object.ptr());
  if (!is_list && !is_dict && !PyTuple_Check(object.ptr())) {
    return Nest<T>(leaf_from_python(object, place));
  }
  if (place.depth() >= kMaxDepth) {
    throw StructureError("at " + place.str() + ": nested more than " +
                         std::to_string(kMaxDepth) +
                         " deep; does a container hold itself?");
  }

  // Lists and dicts are copied, which is cheap: leaf_from_python may run Python
  // code that changes them.
  if (is_dict) {
    auto items = py::reinterpret_steal<py::dict>(PyDict_Copy(object.ptr()));
    if (!items) throw py::error_already_set();
    typename Nest<T>::Map map;
    for (const auto& [key, value] : items) {
      std::string name = internal::key_from_python(key, place);
      Nest<T> child = from_python<T>(value, leaf_from_python, Place(place, name));
      map.emplace(std::move(name), std::move(child));
    }
    return Nest<T>(std::move(map));
  }

  auto items = is_list ? py::reinterpret_steal<py::tuple>(PyList_AsTuple(object.ptr()))
                       : py::reinterpret_borrow<py::tuple>(object);
  if (!items) throw py::error_already_set();
  const size_t size = PyTuple_GET_SIZE(items.ptr());
  typename Nest<T>::Vector vector;
  vector.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    vector.push_back(from_python<T>(PyTuple_GET_ITEM(items.ptr(), i), leaf_from_python,
                                    Place(place, i)));
  }
  return Nest<T>(std::move(vector));
}

// Tuples for vectors, dicts in key order for maps, and leaf_to_python(const T&)
// for leaves.
template <typename T, typename F>
pybind11::object to_python(const Nest<T>& nest, F&& leaf_to_python) {
  namespace py = pybind11;
  if (nest.is_leaf()) return leaf_to_python(nest.leaf());
  if (nest.is_vector()) {
    const size_t size = nest.vector().size();
    py::tuple items(size);
    for (size_t i = 0; i < size; ++i) {
      items[i] = to_python(nest.vector()[i], leaf_to_python);
    }
    return std::move(items);
  }
  py::dict items;
  for (const auto& [key, child] : nest.dict()) {
    items[py::str(key)] = to_python(child, leaf_to_python);
  }
  return std::move(items);
}

}  // namespace nest
