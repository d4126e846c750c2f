"""PolyBeast's programs build the C++ part of a checkout that was set up without it."""

import os
import shutil
import subprocess
import sysconfig
import venv

import pytest
import runs

# As setup.py leaves it where it does not build the module.
SUBSTITUTE = "raise ImportError('was left out; install gRPC', name='libtorchbeast')\n"
LEARN = "--env CartPole-v1 --num_servers 1 --num_actors 1 --unroll_length 5"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a .venv without the C++ part.

    Its scripts/setup does not compile: it uncovers what is installed here.
    """
    shutil.copytree(runs.ROOT / "torchbeast", tmp_path / "torchbeast")
    venv.create(tmp_path / ".venv", symlinks=True)
    (packages,) = (tmp_path / ".venv").glob("lib/python*/site-packages")
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    (packages / "test.pth").write_text("\n".join([str(tmp_path), *installed]))
    (packages / "libtorchbeast.py").write_text(SUBSTITUTE)
    (tmp_path / "scripts").mkdir()
    write_set_up(tmp_path, f"rm {packages}/libtorchbeast.py")
    return tmp_path


def write_set_up(checkout, command):
    (checkout / "scripts/setup").write_text(
        f"echo called >>{checkout}/calls\n{command}\n"
    )


def calls(checkout):
    path = checkout / "calls"
    return path.read_text().count("called") if path.exists() else 0


def run(checkout, arguments):
    env = {**os.environ, "TORCHBEAST_NATIVE": "auto", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        [checkout / ".venv/bin/python", "-m", *arguments.split()],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        timeout=runs.patience(200),
    )


@pytest.mark.slow
def test_first_start_builds_and_trains(checkout):
    command = f"torchbeast.polybeast {LEARN} --savedir {checkout} --xpid run"
    done = run(checkout, f"{command} --total_steps 200")
    assert done.returncode == 0, done.stderr
    assert f"is missing: bash {checkout}/scripts/setup" in done.stderr
    assert "Finished at step" in done.stdout + done.stderr
    assert calls(checkout) == 1
    done = run(checkout, f"{command} --total_steps 400")
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == 1


@pytest.mark.parametrize("program", ["polybeast", "polybeast_learner", "polybeast_env"])
def test_if_it_cannot_be_built_the_reason_follows(program, checkout):
    write_set_up(checkout, "echo needs: g++; exit 1")
    done = run(checkout, f"torchbeast.{program} --env CartPole-v1")
    assert done.returncode == 1
    assert calls(checkout) == 1
    assert "needs: g++" in done.stderr
    assert done.stderr.endswith("was left out; install gRPC\n")
    assert "Traceback" not in done.stderr
