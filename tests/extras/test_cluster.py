"""examples/cluster and docs/cluster.md, tried: a Slurm of three nodes on this machine.

It needs Debian's packages slurmctld, slurmd, slurm-client and munge. There is no Docker
and no Kubernetes here: the commands of their files run as processes.
"""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest
import runs
import watched_runs
import yaml

from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import learner as polybeast_learner

EXAMPLES = runs.ROOT / "examples" / "cluster"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n0", "n1", "n2")
PATIENT = 60.0  # seconds; Slurm starts jobs once per second
ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
MpiDefault=none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES
"""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("slurm"),
    runs.needs_proc,
]


def wait_until(condition, what, seconds=PATIENT):
    def met():
        return condition() or time.sleep(0.2)  # a call of Slurm takes its time

    watched_runs.wait_until(met, what, seconds)


def free_ports(number):
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(socket.create_server(("", 0))) for _ in range(number)
        ]
        return [x.getsockname()[1] for x in found]


class Slurm:
    """Its daemons, as processes of this user, with all of their files in a folder."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.savedir = folder / "runs"
        conf = folder / "slurm.conf"
        self.environment = {**runs.environment(), "SLURM_CONF": str(conf)}
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(NODES))
        conf.write_text(
            CONF.format(host=host, port=port, user=getpass.getuser(), folder=folder)
            + "".join(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                "CPUs=4\n"
                for name, port in zip(NODES, ports, strict=True)
            )
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = ("pid", "seed", "log")
        self.start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            f"--socket={folder}/munge.sock",
            *(f"--{name}-file={folder}/munged.{name}" for name in files),
        )
        self.wait_for((folder / "munge.sock").exists, "munged listens")
        self.start("slurmctld", "-D", "-i")
        for name in NODES:
            self.start("slurmd", "-D", "-N", name)
        self.wait_for(lambda: self.idle() == len(NODES), "all nodes are idle")

    def wait_for(self, condition, what):
        def condition_or_end():
            assert not any(daemon.poll() for daemon in self.daemons)
            return condition()

        wait_until(condition_or_end, what)

    def start(self, *words):
        log = self.folder / f"daemon-{len(self.daemons)}-{words[0]}.log"
        path = shutil.which(words[0], path=f"{os.environ['PATH']}:/usr/sbin")
        with log.open("wb") as output:
            self.daemons.append(
                subprocess.Popen(
                    [path, *words[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def call(self, *words, check=True):
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=runs.ROOT,
            capture_output=True,
            text=True,
            timeout=runs.patience(60),
            check=False,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def idle(self):
        return len(self.call("sinfo", "-Nh", "-t", "idle", check=False).splitlines())

    def submit(self, name, *options, edits, **lines):
        """Submits an example after a user's edits. Returns the job's id.

        Args:
          edits: {text: its replacement}.
          lines: values of the part "Your run".
        """
        text = (EXAMPLES / name).read_text()
        edits = {"host=$(hostname)": "host=localhost", **edits}
        for key, value in {"savedir": self.savedir, **lines}.items():
            text, number = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
            assert number == 1, key
        for old, new in edits.items():
            assert old in text, old
            text = text.replace(old, new)
        script = self.folder / name
        script.write_text(text)
        output = f"--output={self.folder}/%j.log"
        job = self.call("sbatch", "--parsable", output, *options, str(script))
        return int(job)

    def log(self, job):
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{job}.log").read_text(errors="replace")
        return ""

    def state(self, job):
        text = self.call("scontrol", "show", "job", "--oneliner", str(job))
        return re.search(r"JobState=(\w+)", text)[1]

    def wait_for_state(self, job, *states):
        wait_until(lambda: self.state(job) in states, f"{states}")

    def wait_while_it_runs(self, job, condition, what):
        def met():
            if condition():
                return True
            assert (state := self.state(job)) not in ENDED, (state, self.log(job))
            return False

        wait_until(met, what)

    def wait_for_log(self, job, text):
        self.wait_while_it_runs(job, lambda: text in self.log(job), text)

    def run_again(self, job):
        """Starts a requeued job soon; by itself, Slurm waits for two minutes.

        Its nodes refuse it in the second in which it has ended.
        """
        self.wait_for_state(job, "PENDING")
        self.call("scontrol", "update", f"job={job}", "StartTime=now+5")
        self.wait_for_state(job, "RUNNING")

    def node_dies(self, name):
        """Slurm takes a node for dead, for an instant: its daemon is still there."""
        update = ("scontrol", "update", f"nodename={name}")
        self.call(*update, "state=down", "reason=test")
        self.call(*update, "state=resume", check=False)

    def signal(self, job):
        """What Slurm does before the job's time limit (--signal)."""
        self.call("scancel", "--batch", "--signal=USR2", str(job))

    def processes(self, words="", **variables):
        """Processes of jobs with `words` in their command line and these variables."""
        variables["SLURM_CONF"] = self.environment["SLURM_CONF"]
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/environ", "rb") as file:
                    has = set(file.read().split(b"\0"))
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode(errors="replace")
                is_job = any(x.startswith(b"SLURM_JOB_ID=") for x in has)
                if is_job and wanted <= has and words in command:
                    found.append(int(pid))
        return sorted(found)

    def rows(self, xpid):
        with contextlib.suppress(FileNotFoundError):
            return runs.read_logs(self.savedir, xpid)
        return []

    def wait_for_rows(self, job, xpid, streams, number=20):
        """Waits for more rows, and then for one with so many streams."""
        enough = len(self.rows(xpid)) + number

        def found():
            rows = self.rows(xpid)
            return len(rows) >= enough and rows[-1]["streams"] == streams

        self.wait_while_it_runs(job, found, f"{number} rows, {streams} streams")

    def meta(self, xpid):
        return json.loads((self.savedir / xpid / "meta.json").read_text())

    def assert_saved(self, xpid):
        """The last start has saved after its last update."""
        start = self.meta(xpid)
        assert start["exit_status"] == 143, start
        assert start["last_step"] == int(self.rows(xpid)[-1]["step"])
        return start["last_step"]

    def close(self):
        self.call("scancel", "--user", getpass.getuser(), check=False)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), "all jobs end", 40)
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    for name in DAEMONS:
        if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"):
            runs.skip(
                f"{name} is not installed: apt-get install slurmctld slurmd munge"
            )
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python in which environment servers find no PyTorch."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "torch.py").write_text('raise ImportError("there is no PyTorch here")')
    path = folder / "python"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *polybeast_env*)\n'
        f'    export PYTHONPATH="{folder}:$PYTHONPATH" ;;\nesac\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def submit(slurm, python):
    """Submits an example with small flags; ends its job after the test."""
    jobs = []

    def submit(name, *options, **lines):
        jobs.append(slurm.submit(name, *options, python=python, **lines))
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm.call("scancel", str(job), check=False)
    wait_until(lambda: slurm.idle() == 3, "all nodes are idle")


QUICK = "--unroll_length 5 --torch_threads 1 --disable_cuda --checkpoint_interval 5"


@pytest.fixture
def one_learner(submit):
    """Submits learner_and_envs.sbatch with small flags."""

    def start(xpid, total_steps, *options, edits=(), env="CartPole-v1", more=""):
        return submit(
            "learner_and_envs.sbatch",
            *(options or ("--nodes=3",)),
            "--time=30",
            edits={"--cpus-per-task=32": "--cpus-per-task=1", "sleep 30": "sleep 1"}
            | dict(edits),
            xpid=xpid,
            servers=1,
            both=f"(--env {env} --envs_per_actor 3)",
            learner=f"(--total_steps {total_steps} --batch_size 6 {QUICK} {more})",
        )

    return start


def test_one_learner_survives_what_a_cluster_does(slurm, one_learner):
    job = one_learner("one", 10**8)
    slurm.wait_for_rows(job, "one", streams="2")
    (secrets,) = slurm.savedir.glob(".one.*")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert stat.S_IMODE((secrets / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((secrets / "key.pem").stat().st_mode) == 0o600

    # The environment servers of a node are killed.
    for pid in slurm.processes("polybeast_env", SLURMD_NODENAME="n1"):
        os.kill(pid, signal.SIGKILL)
    slurm.wait_for_rows(job, "one", streams="1", number=1)
    slurm.wait_for_rows(job, "one", streams="2")

    # A node dies.
    slurm.node_dies("n2")
    slurm.wait_for_rows(job, "one", streams="1")
    assert slurm.state(job) == "RUNNING"

    # The time limit is near.
    slurm.signal(job)
    slurm.run_again(job)
    step = slurm.assert_saved("one")
    assert step > 0
    slurm.wait_for_log(job, f"Resuming at step {step}.")
    slurm.wait_for_rows(job, "one", streams="2")

    # scancel
    slurm.call("scancel", str(job))
    slurm.wait_for_state(job, "CANCELLED")
    wait_until(lambda: not slurm.processes(), "all processes end")
    step = slurm.assert_saved("one")
    assert not list(slurm.savedir.glob(".one.*"))

    # The same command resumes it; its end is the end of the servers.
    job = one_learner("one", step + 3000)
    slurm.wait_for_state(job, "COMPLETED")
    assert f"Resuming at step {step}." in slurm.log(job)
    wait_until(lambda: not slurm.processes(), "all processes end")
    assert slurm.meta("one")["exit_status"] == 0


def test_an_error_of_the_run_ends_the_job(slurm, one_learner):
    job = one_learner("wrong", 100, env="NoSuchGame-v7", more="--connect_timeout 3")
    slurm.wait_for_state(job, "FAILED")
    assert "NoSuchGame-v7" in slurm.log(job)
    assert not list(slurm.savedir.glob(".wrong.*"))


# --- Containers -----------------------------------------------------------------------


def of_compose():
    """Arguments of the learner's and of the environments' containers, and replicas."""
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    learner, environments = services["learner"], services["environments"]
    replicas = environments["deploy"]["replicas"]
    return learner["command"], environments["command"], replicas


def of_kubernetes():
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    resources = {x["kind"]: x for x in documents}
    values = resources["ConfigMap"]["data"]
    found = []
    for kind in ("Job", "Deployment"):
        spec = resources[kind]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "torchbeast"}}]
        words = container["args"]
        found.append([re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], x) for x in words])
    labels = resources["Job"]["spec"]["template"]["metadata"]["labels"]
    assert resources["Service"]["spec"]["selector"] == labels
    return *found, resources["Deployment"]["spec"]["replicas"]


@pytest.mark.parametrize("read", [of_compose, of_kubernetes])
def test_the_containers_commands_fit(read):
    (module, *learner), environments, replicas = read()
    assert module == "torchbeast.polybeast_learner"
    learner = polybeast_learner.make_parser().parse_args(learner)
    environments = polybeast_env.make_parser().parse_args(environments)
    assert learner.env == environments.env
    assert learner.num_actors == replicas * environments.num_servers
    assert learner.listen == "0.0.0.0:5000"
    assert environments.join.endswith(":5000")
