"""The edits that the docs show: each is applied to a copy of the tree and trained."""

import difflib
import math
import os
import re
import shutil
import subprocess
import sys
from statistics import mean

import pytest
import runs
import torch

DOCS = runs.ROOT / "docs"
DOCUMENT = DOCS / "your_loss.md"
PATCHES = DOCS / "forking"


class Fork:
    """A copy of the tree with one patch applied, or with edits.

    Args:
      patch: name of a patch in docs/forking, or (file, old text, new text) per edit.

    Attributes:
      files: that have changed, or are new.
      lines: per file, the number of its lines that are new or changed.
    """

    def __init__(self, path, patch):
        self.path = path / "tree"
        self.savedir = path / "runs"
        # Git must not find a repository around the copy, nor that of a hook.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environment["GIT_CEILING_DIRECTORIES"] = str(path)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=runs.ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (runs.ROOT / name).is_file():  # not deleted, nor a submodule
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(runs.ROOT / name, self.path / name)
        before = self.read_sources()
        if isinstance(patch, str):
            self.apply(patch, environment)
        else:
            self.edit(patch)
        after = self.read_sources()
        self.lines = {}
        for path in after.keys() | before.keys():
            old, new = (x.get(path, b"").decode().splitlines() for x in (before, after))
            if old != new:
                changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
                count = sum(line.startswith("+") for line in changes)
                self.lines[str(path.relative_to(self.path))] = count
        self.files = self.lines.keys()

    def apply(self, patch, environment):
        applied = subprocess.run(
            ["git", "apply", PATCHES / f"{patch}.patch"],
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
        )
        if applied.returncode:
            pytest.fail(
                f"docs/forking/{patch}.patch no longer applies:\n{applied.stderr}"
                "The end of docs/forking.md says how to update it.",
                pytrace=False,
            )

    def edit(self, edits):
        for name, old, new in edits:
            path = self.path / name
            assert path.read_text().count(old) == 1, f"{name} has no line {old}"
            path.write_text(path.read_text().replace(old, new))

    def read_sources(self):
        return {path: path.read_bytes() for path in self.path.rglob("*.py")}

    def train(self, module="torchbeast.monobeast", timeout=200, **flags):
        """Trains in the copy and returns the rows of logs.csv.

        What is trained also plays, in --mode test and in a notebook.
        """
        settings = {**runs.SMALL, **flags}
        self.run(runs.command(self.savedir, "fork", module, **settings), timeout)
        rows = runs.read_logs(self.savedir, "fork")
        test = {"mode": "test", "num_test_episodes": 1}
        self.run(runs.command(self.savedir, "fork", module, **test))
        self.run([sys.executable, "-m", "played", str(self.savedir / "fork")])
        return rows

    def run(self, words, timeout=200):
        paths = [str(self.path), str(self.path / "tests")]
        search = os.pathsep.join(paths)
        runs.run_words(words, timeout, folder=self.path, PYTHONPATH=search)

    def checkpoint(self):
        return torch.load(self.savedir / "fork" / "model.tar", weights_only=True)


def column(rows, name):
    return [float(row[name]) for row in rows]


def test_another_torso(tmp_path):
    """Also of a Dict that has vectors, and with a lazy layer."""
    fork = Fork(tmp_path, "torso")
    assert fork.lines == {"torchbeast/encoders.py": 7}
    fork.train(env="environments:GridWorld", model="mine", total_steps=50)
    state = fork.checkpoint()["model_state_dict"]
    assert state["images.0.torso.3.weight"].shape == (256, 32 * 6 * 7)


def test_an_auxiliary_loss_with_its_own_head(tmp_path):
    fork = Fork(tmp_path, "auxiliary_loss")
    assert fork.files == {"torchbeast/model.py"}
    rows = fork.train(sync=True)  # the same on each run
    for row in rows:
        parts = ("pg_loss", "baseline_loss", "entropy_loss", "reward_loss")
        total = sum(float(row[name]) for name in parts)
        assert float(row["total_loss"]) == pytest.approx(total, rel=1e-4, abs=1e-3)
    # CartPole's reward is always 1: nothing is easier to predict.
    losses = column(rows, "reward_loss")
    assert mean(losses[-10:]) < 0.5 * mean(losses[:5])
    assert fork.checkpoint()["model_state_dict"]["next_reward.weight"].shape[0] == 1


def test_a_field_of_the_info_that_reaches_the_loss(tmp_path):
    fork = Fork(tmp_path, "field")
    assert fork.files == {"torchbeast/envs/extra_fields.py", "torchbeast/learner.py"}
    num_envs = 4
    rows = fork.train(
        env="BreakoutNoFrameskip-v4",
        **{"no-life_loss": True},
        num_actors=1,
        envs_per_actor=num_envs,
        batch_size=num_envs,
        unroll_length=50,
        total_steps=1600,
    )
    # Breakout gives five lives: finished games lost them all, running ones some.
    games = int(rows[-1]["games"])
    assert games > 0
    lost = sum(column(rows, "lives_lost"))
    assert 5 * games <= lost <= 5 * games + 4 * num_envs
    assert all(0 < lives <= 5 for lives in column(rows, "mean_lives"))


def test_another_optimizer_and_schedule(tmp_path):
    fork = Fork(tmp_path, "optimizer")
    assert fork.files == {"torchbeast/optimizer.py"}
    peak = 0.002
    flags = {"learning_rate": peak, "optimizer": "adam"}
    rates = column(fork.train(**flags), "learning_rate")
    assert len(rates) == 60
    assert rates[:6] == pytest.approx([peak * (0.1 + 0.9 * i / 6) for i in range(6)])
    falling = [peak * math.cos(math.pi / 2 * i / 54) ** 2 for i in range(54)]
    assert rates[6:] == pytest.approx(falling)
    moments = fork.checkpoint()["optimizer_state_dict"]["state"][0]
    assert {"exp_avg", "exp_avg_sq"} <= moments.keys()  # of AdamW
    assert fork.lines == {"torchbeast/optimizer.py": 8}
    group = fork.checkpoint()["optimizer_state_dict"]["param_groups"][0]
    assert group["weight_decay"] == 0.01  # of AdamW alone


LOSS_FILE, MODEL_FILE = "torchbeast/learner.py", "torchbeast/model.py"
SCHEDULE_FILE = "torchbeast/optimizer.py"
# One line each: a loss, columns, another schedule, a coefficient, a field of the agent.
LINES = [
    (
        LOSS_FILE,
        '        "entropy_loss": -entropy_cost * entropy.sum(),\n',
        '        "entropy_loss": -entropy_cost * (1 - progress) ** 2 * entropy.sum(),\n'
        '        "logits_loss": 1e-4 * (target_logits.pow(2).sum(-1) * valid).sum(),\n',
    ),
    (
        LOSS_FILE,
        '        "mean_value": mean(values, valid),\n',
        '        "mean_value": mean(values, valid),\n'
        '        "mean_probs": mean(target_logits.softmax(-1), valid),\n'
        '        "mean_sureness": mean(batch["sureness"][:-1], valid),\n',
    ),
    (SCHEDULE_FILE, "    return 1.0 - progress\n", "    return 0.5**progress\n"),
    (
        MODEL_FILE,
        '        outputs = {"policy_logits": logits, "baseline": baseline}\n',
        '        outputs = {"policy_logits": logits, "baseline": baseline}\n'
        '        outputs["sureness"] = logits.softmax(-1).amax(-1)\n',
    ),
]


def test_lines_for_a_loss_a_column_a_schedule_a_coefficient_and_a_field(tmp_path):
    """What a newcomer changes first: one line each, and a column for the field."""
    fork = Fork(tmp_path, LINES)
    assert fork.lines == {LOSS_FILE: 4, MODEL_FILE: 1, SCHEDULE_FILE: 1}
    text = DOCUMENT.read_text()
    assert all(line in text for line in LINES[0][2].splitlines())
    total, steps = runs.SMALL["total_steps"], 10
    for cells in fork.train(entropy_cost=0.02, learning_rate=0.003):
        row = {name: float(x) for name, x in cells.items() if x}
        parts = ("pg_loss", "baseline_loss", "entropy_loss", "logits_loss")
        assert row["total_loss"] == pytest.approx(sum(row[x] for x in parts), rel=1e-4)
        assert row["logits_loss"] > 0
        assert row["mean_probs_0"] + row["mean_probs_1"] == pytest.approx(1)
        assert 0.5 <= row["mean_sureness"] < 1  # of two actions
        progress = row["step"] / total - steps / total  # before the update
        assert row["learning_rate"] == pytest.approx(0.003 * 0.5**progress)
        cost = -row["entropy_loss"] / row["entropy"] / steps
        assert cost == pytest.approx(0.02 * (1 - progress) ** 2, rel=1e-4)


def test_a_teacher_with_its_own_optimizer(tmp_path):
    fork = Fork(tmp_path, "teacher")
    assert fork.lines == {LOSS_FILE: 26}
    rows = fork.train(sync=True)  # the same on each run
    for row in rows:
        parts = ("pg_loss", "baseline_loss", "entropy_loss", "teacher_loss")
        total = sum(float(row[name]) for name in parts)
        assert float(row["total_loss"]) == pytest.approx(total, rel=1e-4, abs=1e-3)
        assert float(row["teacher_loss"]) > 0
    resumed = fork.train(sync=True, total_steps=750)[len(rows) :]
    saved = fork.checkpoint()
    agent, teacher = saved["model_state_dict"], saved["teacher_state_dict"]
    assert agent.keys() == teacher.keys()
    assert not torch.equal(agent["policy.weight"], teacher["policy.weight"])
    # One update of its own per batch, also after the resume; its values learn nothing.
    moments = saved["teacher_optimizer_state_dict"]["state"]
    (batches,) = {int(x["step"]) for x in moments.values()}
    assert batches == len([*rows, *resumed])
    assert len(moments) < len(teacher)


def test_the_document_shows_the_patches():
    """Every patch is linked, and what a section quotes stands in its patch."""
    pages = [*DOCS.glob("*.md"), runs.ROOT / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    linked = re.findall(r"[(/]forking/(\w+)\.patch\)", text)
    assert set(linked) == {path.stem for path in PATCHES.glob("*.patch")}
    for section in text.split("\n## ")[1:]:
        for quote in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
            (name,) = re.findall(r"[(/]forking/(\w+)\.patch\)", section)
            patch = (PATCHES / f"{name}.patch").read_text().splitlines()
            missing = [line for line in quote.splitlines() if line not in patch]
            assert not missing, f"{name}.patch lacks what its page quotes"
