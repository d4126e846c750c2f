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
std::shared_ptr<Queue> make(int64_t batch_dim, int64_t minimum_batch_size,
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
  if (!allocator.is_none()) options.allocator = allocator_from_python(allocator);
  return make_here<Queue>(std::move(options));
}

// What both queues have. `close_twice` is the error of a second close().
template <typename Queue, typename Class>
void bind_common(Class& bound, const char* close_twice) {
  bound.def("size", &Queue::size, "The number of items that wait.")
      .def(
          "close",
          [close_twice](Queue& self) {
            if (!self.close()) throw std::runtime_error(close_twice);
          },
          py::call_guard<WithoutGil>(), R"(
End all calls that wait and all iterations, and drop the items that wait.

Raises:
    RuntimeError: it was closed already.
)")
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
          R"(
Counters since the beginning: num_batches, num_items and num_entries (along batch_dim) in
them, bytes_copied, pool_bytes (memory held for batches and answers).
)")
      .def("__iter__", [](py::object self) { return self; });
}

void bind_queue(py::module_& m) {
  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>> queue(m, "BatchingQueue",
                                                                  R"(
A queue whose items come out joined along a dimension.

Items are nests (tuples, lists, dicts) of torch tensors or NumPy arrays. All items have
the same structure, dtypes, and sizes except along `batch_dim`. Iterating yields nests of
tuples and dicts. Their leaves are the items' leaves, joined along batch_dim: torch tensors
if torch is imported, else NumPy arrays. Any number of threads may enqueue and iterate.

A C-contiguous, writable array is not copied until its batch is made; do not write to it
before that. A batch of a single item is that item itself, without a copy, unless there is
an allocator.

The memory of a batch is used again as soon as no array that shares it is left. Keep an
array until a copy from it to a GPU is done: with pinned memory, x.to(device,
non_blocking=True) returns while the copy is still in flight. Reading a result that depends
on the copy, such as loss.item(), waits for it.

Args:
    batch_dim: the dimension along which items are joined.
    minimum_batch_size: a batch with this many entries along batch_dim is complete. An
        item has one or more.
    maximum_batch_size: entries that a batch never exceeds.
    timeout_ms: how long an incomplete batch waits for more, in milliseconds. None or inf:
        for ever, or until the queue is full.
    check_inputs: for older code; items are always checked.
    maximum_queue_size: items that may wait before enqueue() blocks. None: any number.
    allocator: function of a number of bytes that returns writable memory of at least that
        size, in which batches are made: a torch tensor, for example of pinned memory, or
        an object with the buffer protocol.

Raises:
    ValueError: an argument is out of range.
)");
  queue
      .def(py::init(&make<BatchingQueue>), py::arg("batch_dim") = 1,
           py::arg("minimum_batch_size") = 1, py::arg("maximum_batch_size") = 1024,
           py::arg("timeout_ms") = py::none(), py::arg("check_inputs") = true,
           py::arg("maximum_queue_size") = py::none(),
           py::arg("allocator") = py::none())
      .def(
          "enqueue",
          [](BatchingQueue& self, const py::object& nest) {
            ArrayNest item = nest_from_python(nest);
            WithoutGil no_gil;
            self.enqueue(std::move(item), check_signals());
          },
          py::arg("nest"), R"(
Add an item; block while the queue is full.

Raises:
    ValueError: an empty nest, a leaf with too few dimensions, leaves whose sizes along
        batch_dim differ, an item that does not fit to those that wait, or a leaf that
        cannot be shared, such as a CUDA tensor. Names the place in the nest.
    TypeError: a leaf that is neither a torch tensor nor a NumPy array.
    ClosedBatchingQueue: the queue was closed before there was room.
)")
      .def("__next__", [](BatchingQueue& self) {
        const auto batch = without_gil([&] { return self.dequeue(check_signals()); });
        if (!batch) throw py::stop_iteration();
        return nest_to_python(*batch);
      });
  bind_common<BatchingQueue>(queue, "the queue was closed already");
}

void bind_batch(py::module_& m) {
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch", R"(
Inputs of several callers of DynamicBatcher.compute(), joined. Iterating over the batcher
yields them. Answer each with set_outputs() or set_error(); if it is dropped without an
answer, its callers get AsyncError. len() is the number of entries along batch_dim.
)")
      .def(
          "get_inputs", [](const Batch& self) { return nest_to_python(self.inputs()); },
          R"(
The inputs, joined along batch_dim; a nest as in BatchingQueue. Do not write to them: a
batch with a single caller holds the caller's memory. The batch keeps this memory.
)")
      .def(
          "set_outputs",
          [](Batch& self, const py::object& nest) {
            const ArrayNest outputs = nest_from_python(nest);
            WithoutGil no_gil;
            self.set_outputs(outputs);
          },
          py::arg("outputs"), R"(
Answer: every caller gets its entries along batch_dim of every leaf, copied.

Raises:
    ValueError: a leaf does not have len(batch) entries along batch_dim, the nest is empty,
        or a leaf cannot be shared. The batch can still be answered.
    RuntimeError: the batch was answered before.
)")
      .def("set_error", &Batch::set_error, py::arg("text"),
           py::call_guard<WithoutGil>(), R"(
Answer with an error: every caller gets AsyncError with this text.

Raises:
    RuntimeError: the batch was answered before.
)")
      .def("__len__", &Batch::size);
}

void bind_batcher(py::module_& m) {
  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>> batcher(
      m, "DynamicBatcher", R"(
Joins the inputs of many threads into batches, and gives each thread its part of the
answer. They wait as long as the batch is alive, which an exception that somebody keeps
holds, too: a loop that can fail answers with set_error().

    for batch in batcher:
        batch.set_outputs(model(batch.get_inputs()))

Args:
    check_outputs: for older code; inputs and outputs are always checked.
    The others as in BatchingQueue; timeout_ms is 100 by default.

Raises:
    ValueError: an argument is out of range.
)");
  batcher
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<double> timeout_ms,
                       bool check_outputs, const py::object& allocator) {
             return make<DynamicBatcher>(batch_dim, minimum_batch_size,
                                         maximum_batch_size, timeout_ms, check_outputs,
                                         std::nullopt, allocator);
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::arg("allocator") = py::none())
      .def(
          "compute",
          [](DynamicBatcher& self, const py::object& nest) {
            ArrayNest inputs = nest_from_python(nest);
            return nest_to_python(without_gil(
                [&] { return self.compute(std::move(inputs), check_signals()); }));
          },
          py::arg("inputs"), R"(
Block until a consumer has answered, and return this caller's part of the answer.

Raises:
    ValueError, TypeError: as BatchingQueue.enqueue().
    ClosedBatchingQueue: the batcher was closed.
    AsyncError: the batch was dropped without an answer, or answered with an error.
)")
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
