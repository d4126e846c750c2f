// Converts between Python's tuples, lists and dicts and nest::Nest.
//
// Tuples, lists and dicts, and instances of their subclasses, are containers. Every
// other object is a leaf, such as an array, string, None, set or other mapping.
// REQUIRES (both functions): the GIL is held.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "nest/nest.h"

namespace nest {

// A list that contains itself must give an error long before the stack overflows.
constexpr size_t kMaxDepth = 64;

namespace internal {

// A str as UTF-8. Its byte order is Python's order of str.
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
// leaf. leaf_from_python can name the leaf in its errors with place.str().
//
// Throws StructureError (ValueError in Python) if containers are nested more than
// kMaxDepth deep, type_error for a dict key that is not a str, and any error of
// leaf_from_python.
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

  // leaf_from_python may run Python code that changes the list or dict. So work on
  // a copy, which is cheap.
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

// A vector becomes a tuple, a map becomes a dict in key order, and a leaf becomes
// leaf_to_python(const T&).
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
