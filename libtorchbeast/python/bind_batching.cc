// BatchingQueue, DynamicBatcher and its Batch.

#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "../batching.h"
#include "arrays.h"
#include "bindings.h"

namespace torchbeast::python {
namespace {

using namespace py::literals;

using Batch = DynamicBatcher::Batch;

template <typename Queue>
std::shared_ptr<Queue> make_queue(int64_t batch_dim, int64_t minimum_batch_size,
                                  int64_t maximum_batch_size,
                                  std::optional<double> timeout_ms, bool /*check*/,
                                  std::optional<int64_t> maximum_queue_size,
                                  const py::object& allocator) {
  load_numpy();
  BatchingOptions options;
  options.batch_dim = to_size(batch_dim, "batch_dim");
  options.minimum_batch_size = minimum_batch_size;
  options.maximum_batch_size = maximum_batch_size;
  if (timeout_ms) options.timeout = to_milliseconds(*timeout_ms, "timeout_ms");
  if (maximum_queue_size) {
    options.maximum_queue_size = to_size(*maximum_queue_size, "maximum_queue_size", 1);
  }
  References references;
  if (!allocator.is_none()) {
    const auto callback = std::make_shared<Callback>(
        allocator, "allocator must be a function of the number of bytes");
    references.callbacks.push_back(callback);
    options.allocator = allocator_from_python(callback);
  }
  return make<Queue>(std::move(references), nullptr, std::move(options));
}

// What both queues have. `close_twice` is the error of a second close().
template <typename Queue, typename Class>
void bind_common(Class& bound, const char* close_twice) {
  bound.def("size", &Queue::size, doc("Queue.size"))
      .def(
          "close",
          [close_twice](Queue& self) {
            if (!self.close()) throw std::runtime_error(close_twice);
          },
          py::call_guard<WithoutGil>(), doc("Queue.close"))
      .def("is_closed", &Queue::is_closed)
      .def(
          "stats",
          [](const Queue& self) {
            const BatchingStats stats = self.stats();
            return py::dict("num_batches"_a = stats.num_batches,
                            "num_items"_a = stats.num_items,
                            "num_entries"_a = stats.num_entries,
                            "bytes_copied"_a = stats.bytes_copied,
                            "pool_bytes"_a = stats.pool_bytes);
          },
          doc("Queue.stats"))
      .def("__iter__", [](py::object self) { return self; });
}

void bind_queue(py::module_& m) {
  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>> queue(
      m, "BatchingQueue", collected<BatchingQueue>(), doc("BatchingQueue"));
  queue
      .def(py::init(&make_queue<BatchingQueue>), "batch_dim"_a = 1,
           "minimum_batch_size"_a = 1, "maximum_batch_size"_a = 1024,
           "timeout_ms"_a = py::none(), "check_inputs"_a = true,
           "maximum_queue_size"_a = py::none(), "allocator"_a = py::none())
      .def(
          "enqueue",
          [](BatchingQueue& self, const py::object& nest) {
            ArrayNest item = nest_from_python(nest);
            WithoutGil no_gil;
            self.enqueue(std::move(item), check_signals());
          },
          "nest"_a, doc("BatchingQueue.enqueue"))
      .def("__next__", [](BatchingQueue& self) {
        const auto batch = without_gil([&] { return self.dequeue(check_signals()); });
        if (!batch) throw py::stop_iteration();
        return nest_to_python(*batch);
      });
  bind_common<BatchingQueue>(queue, "the queue was closed already");
}

void bind_batch(py::module_& m) {
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch", doc("Batch"))
      .def(
          "get_inputs", [](const Batch& self) { return nest_to_python(self.inputs()); },
          doc("Batch.get_inputs"))
      .def(
          "set_outputs",
          [](Batch& self, const py::object& nest) {
            const ArrayNest outputs = nest_from_python(nest);
            WithoutGil no_gil;
            self.set_outputs(outputs);
          },
          "outputs"_a, doc("Batch.set_outputs"))
      .def("set_error", &Batch::set_error, "text"_a, py::call_guard<WithoutGil>(),
           doc("Batch.set_error"))
      .def("__len__", &Batch::size);
}

void bind_batcher(py::module_& m) {
  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>> batcher(
      m, "DynamicBatcher", collected<DynamicBatcher>(), doc("DynamicBatcher"));
  batcher
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<double> timeout_ms,
                       bool check_outputs, const py::object& allocator) {
             return make_queue<DynamicBatcher>(batch_dim, minimum_batch_size,
                                               maximum_batch_size, timeout_ms,
                                               check_outputs, std::nullopt, allocator);
           }),
           "batch_dim"_a = 1, "minimum_batch_size"_a = 1, "maximum_batch_size"_a = 1024,
           "timeout_ms"_a = 100, "check_outputs"_a = true, "allocator"_a = py::none())
      .def(
          "compute",
          [](DynamicBatcher& self, const py::object& nest) {
            ArrayNest inputs = nest_from_python(nest);
            return nest_to_python(without_gil(
                [&] { return self.compute(std::move(inputs), check_signals()); }));
          },
          "inputs"_a, doc("DynamicBatcher.compute"))
      .def("__next__", [](DynamicBatcher& self) {
        auto batch = without_gil([&] { return self.next(check_signals()); });
        if (!batch) throw py::stop_iteration();
        return batch;
      });
  bind_common<DynamicBatcher>(batcher, "the batcher was closed already");
}

}  // namespace

void bind_batching(py::module_& m) {
  bind_queue(m);
  bind_batch(m);
  bind_batcher(m);
}

}  // namespace torchbeast::python
