"""base/parts.py: optional parts and the guests of a run."""

import subprocess
import sys

from torchbeast.base import parts


class Guest:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def close(self, status):
        self.seen.append((self.name, status))
        if self.name == "b":
            raise OSError("full")


def test_guests_are_closed_in_reverse_also_after_an_error(caplog):
    seen = []
    guests = parts.Guests([Guest("a", seen), object(), Guest("b", seen)])
    guests.close(3)
    assert seen == [("b", 3), ("a", 3)]
    assert "full" in caplog.text


def test_methods_and_functions_are_called_where_they_exist(monkeypatch):
    class Polls:
        def poll(self, x):
            return x + 1

    assert parts.Guests([Polls(), object(), Polls()]).all("poll", 2) == [3, 3]
    monkeypatch.setattr(parts, "find", lambda: (Polls(), object()))
    assert parts.call("poll", 4) == [5]
    assert parts.groups() == []


def test_parts_load_neither_torch_nor_their_packages():
    heavy = {"torch", "tensorboard", "wandb", "prometheus_client", "fsspec", "cv2"}
    heavy |= {"tqdm", "ray"}
    code = "import sys; from torchbeast.base import parts; parts.find(); "
    code += f"print({heavy} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
