import ast
import functools
import os
import pathlib
import signal
import sys

import pytest
import runs
import torch

# A shell ignores Ctrl-C in what it starts in the background. The programs that tests
# start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Of tests/polybeast, what --quick runs, too.
QUICK = {
    "test_batching_queue.py",
    "test_libtorchbeast.py",
    "test_nest.py",
    "test_polybeast.py",
    "test_polybeast_sync.py",
}
HAS_PROC = pathlib.Path("/proc/self/stat").exists()
NEED_PROC = {  # they look at the processes of a run
    "test_faults.py",
    "test_peers.py",
    "test_polybeast_faults.py",
    "test_shared_memory.py",
}
NEED_NATIVE = {  # they start programs that import it
    "test_build_on_demand.py",
    "test_cluster.py",
    "test_evaluate_on_servers.py",
    "test_native_ends.py",
    "test_peers.py",
    "test_polybeast.py",
    "test_polybeast_compile.py",
    "test_polybeast_spaces.py",
    "test_polybeast_sync.py",
}
try:
    # The folder of its sources can be imported, too, but is empty.
    from libtorchbeast import ActorPool  # noqa: F401 # only whether it is there
except ImportError as error:
    # If gRPC is missing, MonoBeast's tests still run; see docs/building.md.
    if os.environ.get("TORCHBEAST_NATIVE") == "require":
        raise
    NATIVE_ERROR: str | None = str(error)
else:
    NATIVE_ERROR = None


def pytest_addoption(parser):
    text = "the core's tests and some of PolyBeast's, but none that is marked slow"
    parser.addoption("--quick", action="store_true", help=text)


@functools.cache
def imports_native(path: pathlib.Path) -> bool:
    """Whether it, or what it imports of the tests, imports libtorchbeast."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    folders = path.parent, pathlib.Path(__file__).parent
    helpers = [folder / f"{name}.py" for name in names for folder in folders]
    return "libtorchbeast" in names or any(
        imports_native(helper) for helper in helpers if helper.exists()
    )


def pytest_ignore_collect(collection_path, config):
    if not collection_path.match("test_*.py"):
        return None  # as usual
    name, folder = collection_path.name, collection_path.parent.name
    ignored = (
        (config.getoption("quick") and folder != "tests" and name not in QUICK)
        or (not HAS_PROC and name in NEED_PROC)
        or (NATIVE_ERROR and (name in NEED_NATIVE or imports_native(collection_path)))
    )
    return True if ignored else None


def pytest_report_header():
    lines = []
    if NATIVE_ERROR:
        lines.append("PolyBeast is not tested: " + " ".join(NATIVE_ERROR.split()))
    if not HAS_PROC:
        lines.append("Faults are not tested: this system has no /proc")
    return lines


def pytest_collection_modifyitems(config, items):
    """Without those that --quick leaves out.

    Groups of tests that one process runs one after the other begin first.

    Time limits are for an idle machine. With a low priority, as under scripts/test, all
    other programs come first.
    """
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    if os.nice(0) > 0:
        for item in items:
            mark = item.get_closest_marker("timeout")
            seconds = mark.args[0] if mark else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(4 * seconds), append=False)


pytest_plugins = ["skips", "watched_servers"]


@pytest.fixture(autouse=True, scope="session")
def own_key(tmp_path_factory):
    """Runs are signed with a key of the tests, not with the user's."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(autouse=True)
def no_run_is_left():
    yield
    runs.kill_started()


@pytest.fixture(autouse=True)
def repeatable():
    """One thread, which is fastest for small tensors. Every test has its own seed."""
    torch.set_num_threads(1)
    torch.manual_seed(1)


@pytest.fixture
def address(tmp_path):
    """Where a server of the test may listen."""
    return f"unix:{tmp_path}/socket"


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """The folder of what protoc makes of torchbeast.proto for Python and its gRPC."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    folder = tmp_path_factory.mktemp("stubs")
    words = ["protoc", f"--proto_path={runs.ROOT / 'libtorchbeast' / 'proto'}"]
    words += [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main([*words, "torchbeast.proto"]) == 0
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def wire(stubs):
    """The messages of torchbeast.proto."""
    import torchbeast_pb2

    return torchbeast_pb2
