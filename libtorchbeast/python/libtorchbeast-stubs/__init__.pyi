from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

_Path = str | PathLike[str] | None
_Allocator = Callable[[int], Any]

class AsyncError(RuntimeError): ...
class ClosedBatchingQueue(RuntimeError): ...
class TransportError(RuntimeError): ...
class RefusedError(TransportError): ...
class WireError(RuntimeError): ...

class BatchingQueue:
    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: float | None = None,
        check_inputs: bool = True,
        maximum_queue_size: int | None = None,
        allocator: _Allocator | None = None,
    ) -> None: ...
    def enqueue(self, nest: Any) -> None: ...
    def size(self) -> int: ...
    def close(self) -> None: ...
    def is_closed(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> Any: ...

class Batch:
    def get_inputs(self) -> Any: ...
    def set_outputs(self, outputs: Any) -> None: ...
    def set_error(self, text: str) -> None: ...
    def __len__(self) -> int: ...

class DynamicBatcher:
    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: float | None = 100,
        check_outputs: bool = True,
        allocator: _Allocator | None = None,
    ) -> None: ...
    def compute(self, inputs: Any) -> Any: ...
    def size(self) -> int: ...
    def close(self) -> None: ...
    def is_closed(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch: ...

class ActorPool:
    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: Any,
        *,
        named_rows: bool = False,
        max_rollout_bytes: int | None = None,
        step_timeout_s: float = 60.0,
        maximum_downtime_s: float = 60.0,
        max_env_failures: int = 10,
        hello: bytes | None = None,
        listener: Listener | None = None,
        expected: dict[str, Any] | None = None,
        seed: int | None = None,
        first_stream: int = 0,
        stream_stride: int = 1,
        tls_ca: _Path = None,
        tls_cert: _Path = None,
        tls_key: _Path = None,
        tls_server_name: str | None = None,
        token: str | None = None,
        insecure: bool = False,
    ) -> None: ...
    def run(self) -> None: ...
    def close(self) -> None: ...
    def count(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def events(self) -> tuple[list[tuple[float, str, str]], int]: ...

class Server:
    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str = "unix:/tmp/polybeast",
        *,
        max_streams: int = 256,
        name: str = "",
        settings: dict[str, str] = ...,
        tls_ca: _Path = None,
        tls_cert: _Path = None,
        tls_key: _Path = None,
        tls_server_name: str | None = None,
        token: str | None = None,
        insecure: bool = False,
    ) -> None: ...
    def run(self) -> None: ...
    def start(self) -> None: ...
    def stop(self, timeout_s: float = 5.0) -> None: ...
    @property
    def address(self) -> str: ...
    def stats(self) -> dict[str, Any]: ...

class Listener:
    def __init__(
        self,
        address: str,
        *,
        max_streams: int = 256,
        expected: dict[str, Any] | None = None,
        seed: int | None = None,
        hello_timeout_s: float = 60.0,
        tls_ca: _Path = None,
        tls_cert: _Path = None,
        tls_key: _Path = None,
        token: str | None = None,
        insecure: bool = False,
    ) -> None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def probe(self, timeout_s: float = 60.0) -> dict[str, Any]: ...
    def refuse(self, hello: bytes, reason: str) -> None: ...
    def events(self) -> tuple[list[tuple[float, str, str]], int]: ...
    @property
    def address(self) -> str: ...
    def stats(self) -> dict[str, Any]: ...

class Client:
    def __init__(
        self,
        env_class: Callable[[], Any],
        learner_address: str,
        name: str = "",
        *,
        maximum_downtime_s: float | None = 60.0,
        settings: dict[str, str] = ...,
        tls_ca: _Path = None,
        tls_cert: _Path = None,
        tls_key: _Path = None,
        tls_server_name: str | None = None,
        token: str | None = None,
        insecure: bool = False,
    ) -> None: ...
    def run(self, num_episodes: int | None = None) -> None: ...
    def stop(self, timeout_s: float = 5.0) -> None: ...
    def stats(self) -> dict[str, Any]: ...

def probe(
    address: str,
    timeout_s: float = 10.0,
    *,
    expected: dict[str, Any] | None = None,
    tls_ca: _Path = None,
    tls_cert: _Path = None,
    tls_key: _Path = None,
    tls_server_name: str | None = None,
    token: str | None = None,
    insecure: bool = False,
) -> dict[str, Any]: ...
