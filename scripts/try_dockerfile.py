"""Carries out the Dockerfile without a Docker engine, in folders with a Debian system.

    python3 scripts/try_dockerfile.py stages
    python3 scripts/try_dockerfile.py build CONTEXT ROOT...   one root folder per stage
    python3 scripts/try_dockerfile.py run [--stage NAME] [--stop-at TEXT] ROOT [ARG...]

`build` runs each instruction with chroot, as root, with the variables that Docker would
set. It also passes on pip's settings and the proxies of this process. `run` starts a
stage, by default the last one, as `docker run IMAGE ARGUMENT...` does: with its user,
in its folder, as process 1. Process 1 gets SIGTERM, as from `docker stop`, if this
program gets it and, with --stop-at, as soon as a line of output contains TEXT.
scripts/bare_system_trial makes the root folders. The program handles only the kinds of
instructions that the Dockerfile uses; others are errors.
"""

import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """A FROM and its instructions, with the settings in effect so far."""

    image: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})
    user: str = "0"
    folder: str = "/"
    command: list[str] = field(default_factory=list)


def parse(text: str) -> list[Stage]:
    """The stages of a Dockerfile, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        if not line.strip():
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            image, *name = rest.split()  # FROM image AS name
            stages.append(Stage(image, name[1] if name else str(len(stages))))
        else:
            stages[-1].instructions.append((word, rest))
    return stages


def copies(rest: str) -> tuple[str, list[str], str]:
    """The arguments of COPY: source stage or '', sources, destination."""
    stage, *words = rest.split() if rest.startswith("--from=") else ("", *rest.split())
    return stage.removeprefix("--from="), words[:-1], words[-1]


def ignored(name: str, dockerignore: str) -> bool:
    """Whether .dockerignore excludes a top-level name; its last match decides."""
    answer = False
    for line in dockerignore.splitlines():
        if fnmatch.fnmatch(name, line.removeprefix("!")):
            answer = not line.startswith("!")
    return answer


def setting(stage: Stage, arguments: dict[str, str], word: str, rest: str) -> bool:
    """Carry out an instruction that only changes settings; False for any other."""
    known = {**arguments, **stage.env}
    if word == "ENV":
        for assignment in shlex.split(rest):
            name, _, value = assignment.partition("=")
            stage.env[name] = re.sub(r"\$(\w+)", lambda m: known.get(m[1], ""), value)
    elif word == "ARG":
        name, has_default, value = rest.partition("=")
        if has_default:
            arguments[name] = value
    elif word == "USER":
        stage.user = rest
    elif word in ("ENTRYPOINT", "CMD"):
        stage.command += json.loads(rest)
    elif word == "WORKDIR":
        stage.folder = os.path.join(stage.folder, rest)
    else:
        return word == "VOLUME"
    return True


def chroot(root: str, stage: Stage, command: list[str]) -> list[str]:
    enter = 'cd "$1" && shift && exec "$@"'
    words = ["chroot", f"--userspec={stage.user}", root, "/bin/sh", "-c", enter, "sh"]
    return [*words, stage.folder, *command]


def build(stages: list[Stage], context: str, roots: dict[str, str]) -> None:
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    dockerignore = (REPOSITORY / ".dockerignore").read_text()
    for stage in stages:
        root = roots[stage.name]
        arguments: dict[str, str] = {}
        for word, rest in stage.instructions:
            print(f"[{stage.name}] {word} {rest}", flush=True)
            started = time.monotonic()
            if setting(stage, arguments, word, rest):
                os.makedirs(f"{root}{stage.folder}", exist_ok=True)
                continue
            if word == "RUN":
                command = chroot(root, stage, ["/bin/sh", "-c", rest])
                environment = {**passed_on, **arguments, **stage.env}
            elif word == "COPY":
                origin, sources, destination = copies(rest)
                for name in sources:
                    if not origin and ignored(name, dockerignore):
                        sys.exit(f"COPY {name}: .dockerignore excludes it")
                top = roots[origin] if origin else context
                paths = [os.path.join(top, name.lstrip("/")) for name in sources]
                # Docker copies the contents of a folder.
                paths = [f"{p}/." if os.path.isdir(p) else p for p in paths]
                target = root + os.path.join(stage.folder, destination)
                if os.path.isdir(paths[0]):
                    os.makedirs(target, exist_ok=True)
                command = ["cp", "--archive", "--no-preserve=ownership", *paths, target]
                environment = dict(os.environ)
            else:
                sys.exit(f"this program does not handle the instruction {word} {rest}")
            subprocess.run(command, env=environment, check=True)
            print(f"[{stage.name}] {time.monotonic() - started:.1f} s", flush=True)


def run(stage: Stage, root: str, stop_at: str | None, arguments: list[str]) -> int:
    """Run a stage's entry point; returns its exit status."""
    for word, rest in stage.instructions:
        setting(stage, {}, word, rest)
    own_processes = ["unshare", "--pid", "--fork", "--kill-child"]
    process = subprocess.Popen(
        [
            *(*own_processes, f"--mount-proc={root}/proc"),
            *chroot(root, stage, [*stage.command, *arguments]),
        ],
        env=stage.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )

    def stop(*_: object) -> None:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        (first,) = Path(children).read_text().split()
        os.kill(int(first), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if stop_at is not None and stop_at in line:
            stop_at = None
            stop()
    return process.wait()


def main() -> int:
    stages = parse((REPOSITORY / "Dockerfile").read_text())
    what, *words = sys.argv[1:]
    if what == "stages":
        print(*(stage.name for stage in stages))
    elif what == "build":
        context, *roots = words
        names = [stage.name for stage in stages]
        build(stages, context, dict(zip(names, roots, strict=True)))
    elif what == "run":
        stage, stop_at = stages[-1], None
        if words[0] == "--stage":
            (stage,) = (x for x in stages if x.name == words[1])
            words = words[2:]
        if words[0] == "--stop-at":
            _, stop_at, *words = words
        root, *arguments = words
        return run(stage, root, stop_at, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
