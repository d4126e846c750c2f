// The Python module `nest`.
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "nest/nest.h"
#include "nest/pybind.h"

namespace py = pybind11;

namespace {

using PyNest = nest::Nest<py::object>;

PyNest read(py::handle object) {
  auto hold = [](py::handle leaf, const nest::Place&) {
    return py::reinterpret_borrow<py::object>(leaf);
  };
  return nest::from_python<py::object>(object, hold);
}

// Converts `nest` to Python with the container types of `like`, from which it was
// read. Throws if the user's function has changed `like` since.
py::object write(const PyNest& nest, py::handle like) {
  auto check_unchanged = [](bool unchanged) {
    if (!unchanged) throw nest::StructureError("f changed the nest");
  };

  if (nest.is_leaf()) return nest.leaf();

  if (nest.is_map()) {
    check_unchanged(PyDict_Check(like.ptr()));
    py::dict result;
    for (const auto& [name, child] : nest.dict()) {
      const py::str key(name);
      auto old = py::reinterpret_borrow<py::object>(
          PyDict_GetItemWithError(like.ptr(), key.ptr()));
      if (PyErr_Occurred()) throw py::error_already_set();
      check_unchanged(static_cast<bool>(old));
      result[key] = write(child, old);
    }
    return std::move(result);
  }

  const bool is_list = PyList_Check(like.ptr());
  check_unchanged(is_list || PyTuple_Check(like.ptr()));
  const size_t size = nest.vector().size();
  py::list result;
  for (size_t i = 0; i < size; ++i) {
    // Check in every round: building a child may run Python code (_make, below).
    check_unchanged(static_cast<size_t>(Py_SIZE(like.ptr())) == size);
    auto old = py::reinterpret_borrow<py::object>(
        is_list ? PyList_GET_ITEM(like.ptr(), i) : PyTuple_GET_ITEM(like.ptr(), i));
    result.append(write(nest.vector()[i], old));
  }
  if (is_list) return std::move(result);
  const py::object type = py::type::of(like);
  if (py::hasattr(type, "_make")) {  // a namedtuple
    return type.attr("_make")(result);
  }
  return py::tuple(result);
}

py::list to_list(std::vector<py::object> objects) {
  py::list result(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) result[i] = std::move(objects[i]);
  return result;
}

py::object map(const py::function& f, const py::object& n) {
  auto call = [&f](py::object&& leaf) { return f(std::move(leaf)); };
  return write(read(n).map(call), n);
}

py::object map_many(const py::function& f, const py::args& nests) {
  if (nests.empty()) throw py::value_error("map_many needs at least one nest");
  std::vector<PyNest> all;
  all.reserve(nests.size());
  for (py::handle n : nests) all.push_back(read(n));
  auto call = [&f](std::vector<py::object>&& leaves) {
    return f(to_list(std::move(leaves)));
  };
  return write(nest::zip(std::move(all)).map(call), nests[0]);
}

py::object map_many2(const py::function& f, const py::object& n1,
                     const py::object& n2) {
  auto call = [&f](const std::vector<py::object>& pair) { return f(pair[0], pair[1]); };
  return write(nest::zip<py::object>({read(n1), read(n2)}).map(call), n1);
}

py::list flatten(const py::object& n) { return to_list(read(n).flatten()); }

py::object pack_as(const py::object& n, const py::sequence& sequence) {
  std::vector<py::object> leaves;
  for (py::handle leaf : py::list(sequence)) {
    leaves.push_back(py::reinterpret_borrow<py::object>(leaf));
  }
  return write(nest::pack_as(read(n), std::move(leaves)), n);
}

py::object front(const py::object& n) { return read(n).front(); }

}  // namespace

PYBIND11_MODULE(nest, m) {
  m.doc() = R"(Functions on nested tuples, lists and dicts.

A nest is a leaf, or a tuple, list or dict of nests. Every other object is a leaf,
such as an array, string, None, set or other mapping.

Functions visit dicts in key order, and the dicts of results have key order. A
result has the containers of the (first) nest given: tuple, list, dict, or the
same namedtuple. An instance of another subclass becomes its plain base type: an
OrderedDict becomes a dict, a torch.Size a tuple.

Raises ValueError if structures differ (the text names the place, as in
`at [0]["reward"]`), or if containers are nested more than 64 deep or a container
holds itself. Raises TypeError for a dict key that is not a str.)";

  m.def("map", &map, py::arg("f"), py::arg("n"),
        R"(The nest of the results of f(leaf).)");
  m.def("map_many", &map_many, py::arg("f"),
        R"(The nest of the results of f(leaves).

leaves is a list with the leaf of each nest at this place. Raises ValueError, before
it calls f, if no nest is given or a structure differs from the first.)");
  m.def("map_many2", &map_many2, py::arg("f"), py::arg("n1"), py::arg("n2"),
        R"(The nest of the results of f(leaf of n1, leaf of n2).

Raises ValueError, before it calls f, if the structures differ.)");
  m.def("flatten", &flatten, py::arg("n"), R"(The list of the leaves, in order.)");
  m.def("pack_as", &pack_as, py::arg("n"), py::arg("sequence"),
        R"(The leaves in sequence, in the structure of n.

Raises ValueError if their number differs from the number of leaves in n.)");
  m.def("front", &front, py::arg("n"),
        R"(The first leaf. Raises ValueError if there is none.)");
}
