"""An environment owns its process: whatever it changes there, the run is not affected.

tests/selfish.py has the environment that changes everything.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import runs

from torchbeast import monobeast

TINY = {**runs.SMALL, "num_actors": 1, "envs_per_actor": 2, "total_steps": 100}


def test_a_selfish_environment(tmp_path):
    check_selfish(tmp_path, "torchbeast.monobeast")


def check_selfish(tmp_path, module, **more):
    """It trains, ends and is filmed; close() raises, which is a warning."""
    flags = {**TINY, "env": "selfish:Environment", "normalize_observations": True}
    flags |= more
    words = runs.command("runs", "a", module=module, **flags)
    output = runs.run_words(words, folder=tmp_path)
    rows = runs.read_logs(tmp_path / "runs", "a")
    assert float(rows[-1]["step"]) == 100
    assert "AssertionError" not in output
    assert "RuntimeError: the display is gone" in output
    assert "Traceback" in output
    assert not (tmp_path / "own" / "runs").exists()

    test = {"mode": "test", "num_test_episodes": 2, "video": "a.mp4"}
    output = runs.run_words(
        runs.command("runs", "a", module=module, **test), folder=tmp_path
    )
    assert "2 games" in output
    assert (tmp_path / "a.mp4").stat().st_size > 0


def test_a_flood_of_output_without_a_reader(tmp_path):
    check_flood(tmp_path)


def check_flood(tmp_path, **more):
    flags = {**TINY, "env": "noisy:Environment", **more}
    (tmp_path / "noisy.py").write_text(NOISY)
    process = subprocess.Popen(
        runs.command(tmp_path, "a", **flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**runs.environment(), "PYTHONPATH": f"{runs.ROOT}/tests:{tmp_path}"},
    )
    while b"flood" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(100) == 0
    assert float(runs.read_logs(tmp_path, "a")[-1]["step"]) == 100


NOISY = """
import sys
import faulty

class Environment(faulty.Environment):
    def step(self, action):
        print("flood" * 999)
        print("flood" * 999, file=sys.stderr, flush=True)
        sys.stdout.buffer.write(b"flood" * 999)
        return super().step(action)
"""


def test_main_in_another_thread(tmp_path, caplog):
    """It trains, and says that signals can't stop it."""
    words = runs.command(tmp_path, "a", **TINY)[3:]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(monobeast.main, words).result(timeout=100) == 0
    assert "This is not the main thread" in caplog.text
    assert float(runs.read_logs(tmp_path, "a")[-1]["step"]) == 100


def test_a_script_that_calls_main_when_it_is_imported(tmp_path):
    module = "torchbeast.monobeast"
    words = runs.command(tmp_path, "a", module=module, **TINY)
    script = tmp_path / "script.py"
    lines = "import sys", f"import {module}", f"sys.exit({module}.main(sys.argv[1:]))"
    script.write_text("\n".join(lines))
    output = runs.run_words([words[0], str(script), *words[3:]], status=1)
    assert "put the call under `if __name__ == '__main__':`" in output
    assert "Traceback" not in output
