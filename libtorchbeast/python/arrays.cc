#include "arrays.h"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "nest/pybind.h"

namespace torchbeast::python {
namespace {

constexpr size_t kNumDTypes = static_cast<size_t>(DType::kFloat64) + 1;
constexpr char kDTypes[] =
    "bool, uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, float32 "
    "and float64";

// torch's names, once it is imported. They are kept for good: a module is not unloaded.
struct Torch {
  PyObject* tensor_type = nullptr;
  PyObject* from_numpy = nullptr;
};

const Torch* find_torch() {
  static Torch torch;  // guarded by the GIL
  if (torch.from_numpy != nullptr) return &torch;
  PyObject* const modules = PyImport_GetModuleDict();
  PyObject* const module = PyDict_GetItemString(modules, "torch");
  if (module == nullptr) return nullptr;
  // Another thread may be in the middle of importing it.
  py::object tensor_type = py::getattr(module, "Tensor", py::none());
  py::object from_numpy = py::getattr(module, "from_numpy", py::none());
  if (!PyType_Check(tensor_type.ptr()) || from_numpy.is_none()) return nullptr;
  torch.tensor_type = tensor_type.release().ptr();
  torch.from_numpy = from_numpy.release().ptr();
  return &torch;
}

std::string name_of_type(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// The NumPy array that shares a tensor's memory.
py::array from_tensor(py::handle tensor, const nest::Place& place,
                      bool may_detach = true) {
  static PyObject* const numpy = PyUnicode_InternFromString("numpy");
  auto array =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), numpy));
  if (!array) {
    const py::error_already_set error;
    if (may_detach && py::cast<bool>(tensor.attr("requires_grad"))) {
      return from_tensor(tensor.attr("detach")(), place, false);
    }
    const py::str why = call_half("arguments", "explain_tensor", tensor, error.value());
    throw std::invalid_argument("at " + place.str() + ": " + std::string(why) +
                                kDTypes);
  }
  if (!py::isinstance<py::array>(array)) {
    throw py::type_error("at " + place.str() + ": numpy() of a " +
                         name_of_type(tensor) + " returns a " + name_of_type(array) +
                         ", not an array");
  }
  return py::reinterpret_steal<py::array>(array.release());
}

Array from_array(py::array array, const nest::Place& place) {
  std::optional<DType> dtype = from_numpy(array);
  constexpr int kShareable = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                             py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                             py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  const bool shared = dtype && (array.flags() & kShareable) == kShareable;
  if (!shared) {
    const py::dtype native = array.dtype().attr("newbyteorder")("=");
    array =
        array.attr("astype")(native, py::arg("order") = "C", py::arg("copy") = true);
    dtype = from_numpy(array);
    if (!dtype) {
      throw std::invalid_argument("at " + place.str() + ": an array of dtype " +
                                  std::string(py::str(array.dtype())) +
                                  ", allowed are " + kDTypes);
    }
  }
  Shape shape;
  try {
    for (py::ssize_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("at " + place.str() + ": " + error.what());
  }
  auto* const data = static_cast<uint8_t*>(array.mutable_data());
  return Array({*dtype, shape}, data, keep(std::move(array)));
}

Array leaf_from_python(py::handle leaf, const nest::Place& place) {
  if (const Torch* torch = find_torch()) {
    const int is_tensor = PyObject_IsInstance(leaf.ptr(), torch->tensor_type);
    if (is_tensor < 0) throw py::error_already_set();
    if (is_tensor > 0) return from_array(from_tensor(leaf, place), place);
  }
  if (!py::isinstance<py::array>(leaf)) {
    throw py::type_error("at " + place.str() +
                         ": a leaf must be a torch tensor or a NumPy array, not " +
                         name_of_type(leaf));
  }
  return from_array(py::reinterpret_borrow<py::array>(leaf), place);
}

py::object leaf_to_python(const Array& array, const Torch* torch) {
  py::array result = to_numpy(array);
  if (torch == nullptr) return std::move(result);
  auto tensor = py::reinterpret_steal<py::object>(
      PyObject_CallOneArg(torch->from_numpy, result.ptr()));
  if (!tensor) throw py::error_already_set();
  return tensor;
}

// In the array's memory, which `base` keeps alive; without one in memory of its own.
py::array make_array(const Array& array, py::handle base) {
  const Shape& shape = array.shape();
  return py::array(to_numpy(array.dtype()),
                   std::vector<py::ssize_t>(shape.begin(), shape.end()), array.data(),
                   base);
}

}  // namespace

void load_numpy() { to_numpy(DType::kBool); }

const py::dtype& to_numpy(DType dtype) {
  using Table = std::array<py::dtype, kNumDTypes>;
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Table> storage;
  const Table& table = storage
                           .call_once_and_store_result([] {
                             Table result;
                             for (size_t i = 1; i < kNumDTypes; ++i) {
                               result[i] = py::dtype(dtype_name(static_cast<DType>(i)));
                             }
                             return result;
                           })
                           .get_stored();
  return table.at(static_cast<size_t>(dtype));
}

bool has_dtype(const py::array& array, DType dtype) {
  // Most arrays have NumPy's own object of a dtype.
  const py::detail::PyArray_Proxy* const proxy = py::detail::array_proxy(array.ptr());
  return proxy->descr == to_numpy(dtype).ptr() || from_numpy(array) == dtype;
}

std::optional<DType> from_numpy(const py::array& array) {
  const py::dtype dtype = array.dtype();
  const char order = dtype.byteorder();
  if (order != '=' && order != '|') return std::nullopt;
  const auto size = static_cast<size_t>(dtype.itemsize());
  const char kind = dtype.kind();
  for (size_t i = 1; i < kNumDTypes; ++i) {
    const auto candidate = static_cast<DType>(i);
    // NumPy's letters for the kinds are the first ones of the names: b, u, i and f.
    if (dtype_name(candidate)[0] == kind && item_size(candidate) == size) {
      return candidate;
    }
  }
  return std::nullopt;
}

py::array to_numpy(const Array& array) {
  auto owner = std::make_unique<std::shared_ptr<void>>(array.owner());
  const py::capsule base(owner.get(), [](void* p) {
    const std::unique_ptr<std::shared_ptr<void>> gone(
        static_cast<std::shared_ptr<void>*>(p));
  });
  static_cast<void>(owner.release());  // it is the capsule's
  return make_array(array, base);
}

py::array copy_to_numpy(const Array& array) { return make_array(array, nullptr); }

ArrayNest nest_from_python(py::handle nest) {
  return nest::from_python<Array>(nest, leaf_from_python);
}

py::object nest_to_python(const ArrayNest& nest) {
  const Torch* const torch = find_torch();
  return nest::to_python(
      nest, [torch](const Array& array) { return leaf_to_python(array, torch); });
}

MemoryPool::Allocator allocator_from_python(std::shared_ptr<Callback> function) {
  return [function = std::move(function)](size_t num_bytes) {
    WithGil gil;
    py::object memory = (*function)(py::make_tuple(num_bytes));
    const Torch* const torch = find_torch();
    if (torch != nullptr &&
        PyObject_IsInstance(memory.ptr(), torch->tensor_type) == 1) {
      memory = from_tensor(memory, nest::Place());
    }
    py::object view = call_half("arguments", "to_memoryview", memory, num_bytes);
    const Py_buffer& buffer = *PyMemoryView_GET_BUFFER(view.ptr());
    auto* const data = static_cast<uint8_t*>(buffer.buf);
    if (reinterpret_cast<uintptr_t>(data) % alignof(double) != 0) {
      throw py::value_error("the allocator's memory is not aligned to " +
                            std::to_string(alignof(double)) + " bytes");
    }
    return MemoryPool::Block(keep(std::move(view)), data);
  };
}

}  // namespace torchbeast::python
