"""What a line of torchbeast/flags.py declares: type, default, range, class, help.

Importing this module does not load torch.
"""

import argparse
import dataclasses
import enum
import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torchbeast.base.errors import FlagError


class Resume(enum.Enum):
    """What a resumed run does with a flag. A flag without one fixes what is learned."""

    START = "describes one start, so that the checkpoint's value is not used"
    FREE = "may change, because it does not change what the run learns"
    TUNE = "may change, even with --sync: it sets how the run learns from now on"


START, FREE, TUNE = Resume

# They name code as MODULE:NAME.
CODE_FLAGS = ("env", "wrapper", "encoder", "core", "explorer", "loss")


class Range(NamedTuple):
    """A closed interval, and its description in words."""

    low: float
    high: float
    words: str

    def __contains__(self, x: object) -> bool:
        assert isinstance(x, int | float)
        return self.low <= x <= self.high  # false for NaN


LARGEST_COUNT, LARGEST_STEP = 2**31 - 1, 2**63 - 1
_LARGEST, _SMALLEST = sys.float_info.max, math.ulp(0.0)  # finite, and above 0
COUNT = Range(1, LARGEST_COUNT, f"at least 1 and at most {LARGEST_COUNT}")
COUNT_OR_0 = Range(0, LARGEST_COUNT, f"at least 0 and at most {LARGEST_COUNT}")
STEPS = Range(1, LARGEST_STEP, f"at least 1 and at most {LARGEST_STEP}")
STEPS_OR_0 = Range(0, LARGEST_STEP, f"at least 0 and at most {LARGEST_STEP}")
FINITE = Range(-_LARGEST, _LARGEST, "finite")
AT_LEAST_0 = Range(0, _LARGEST, "at least 0 and finite")
AT_LEAST_0_OR_INF = Range(0, math.inf, "at least 0")
POSITIVE_OR_INF = Range(_SMALLEST, math.inf, "more than 0")
SHARE = Range(0, 1, "in [0, 1]")
BELOW_1 = Range(0, math.nextafter(1, 0), "in [0, 1)")
SECONDS = Range(_SMALLEST, 1e6, "in (0, 1e+06]")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A declared flag; the object of the flags has its value.

    Attributes:
      needs: another flag, without which it has no effect.
      converter: makes the value of a text: bool, int, float, str, or a function that
        raises ArgumentTypeError. By default it is the declared type.
    """

    default: Any
    help: str
    range: Range | None = None
    resume: Resume | None = None
    choices: Sequence[str] = ()
    alias: str | None = None
    metavar: str | None = None
    needs: str | None = None
    converter: Callable[[str], Any] = str
    name: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        of = typing.get_type_hints(owner)[name]
        kinds = [x for x in typing.get_args(of) or [of] if x is not type(None)]
        object.__setattr__(self, "name", name)
        if self.converter is str:
            object.__setattr__(self, "converter", kinds[0])

    def __get__(self, flags: Any, owner: type) -> Any:
        # The values are in the object's __dict__, where Python looks first.
        if flags is None:
            return self
        raise AttributeError(f"this script has no flag {self.name}")

    @property
    def is_number(self) -> bool:
        return self.converter in (int, float)

    @property
    def options(self) -> list[str]:
        """The words that set it, such as --sync and --no-sync."""
        words = [f"--{self.name}", *([f"--{self.alias}"] if self.alias else [])]
        return [*words, *([f"--no-{self.name}"] if self.converter is bool else [])]

    def convert(self, text: str) -> Any:
        """The value of a text, but not of a switch.

        Raises:
          ArgumentTypeError: there is no such value.
        """
        try:
            value = self.converter(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"invalid {self.converter.__name__} value: {text!r}"
            ) from None
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(repr, self.choices))
            raise argparse.ArgumentTypeError(
                f"invalid choice: {value!r} (choose from {allowed})"
            )
        return value

    def from_file(self, value: Any) -> Any:
        """The value that TOML, JSON or a checkpoint has, as if it had been typed.

        A list of texts is joined by commas. None means that the flag was left out.

        Raises:
          FlagError: it has a wrong type, or there is no such value.
        """
        try:
            if value is None or (self.converter is bool and isinstance(value, bool)):
                return value
            if self.converter is bool or isinstance(value, bool):
                raise TypeError("only switches are true or false")
            if isinstance(value, list):
                value = ",".join(value)
            elif isinstance(value, dict):
                value = json.dumps(value)
            if not isinstance(value, int | float | str if self.is_number else str):
                raise TypeError("it must be a number or a text in quotes")
            return self.convert(str(value))
        except (TypeError, argparse.ArgumentTypeError) as error:
            fork = ". If a fork saved it, use the fork's code" if self.choices else ""
            raise FlagError(
                f"the flag {self.name} is {value!r:.80}, of the type "
                f"{type(value).__name__}: {error}{fork}"
            ) from None

    def add_to(self, group: Any) -> None:
        """Adds it to a group of an argparse parser, which gives no default."""
        words: dict[str, Any] = {"help": self.help.replace("%", "%%")}
        if self.default is not None:
            words["help"] += f" (default: {self.default})"
        names = [f"--{self.name}", *([f"--{self.alias}"] if self.alias else [])]
        if self.converter is not bool:
            words |= {"type": self.convert, "metavar": self.metavar}
            words["choices"] = self.choices or None
        else:
            words["action"] = argparse.BooleanOptionalAction
        group.add_argument(*names, **words).default = argparse.SUPPRESS


def flag(default: Any, help: str, *marks: Range | Resume, **more: Any) -> Any:
    """Declares a flag in a class: `NAME: TYPE = flag(default, help, range, class)`.

    It counts as Any, so that mypy takes the type of the attribute.

    Args:
      more: other attributes of Flag.
    """
    for mark in marks:
        more["range" if isinstance(mark, Range) else "resume"] = mark
    return Flag(default, help, **more)


def json_object(text: str) -> str:
    """Checks a JSON object, for argparse. Returns it with sorted names."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is not an object, such as '{{"size": 8}}'"""
        )
    return json.dumps(value, sort_keys=True)


class Group:
    """Flags under one title of --help: a class whose attributes are declared flags."""

    title: str | None = None

    @classmethod
    def declared(cls) -> dict[str, Flag]:
        return {name: x for name, x in vars(cls).items() if isinstance(x, Flag)}


class FlagParser(argparse.ArgumentParser):
    """A parser of groups of flags. It gives typed flags only, and no defaults.

    Args:
      choices: of flags whose choices flags.py does not know, by name.
      defaults: of flags that have another default in this script, by name.

    Attributes:
      declared: the flags, by name.
    """

    def __init__(
        self,
        description: str,
        groups: Iterable[type[Group]],
        choices: dict[str, Iterable[str]],
        **defaults: Any,
    ) -> None:
        super().__init__(description=description)
        self.declared: dict[str, Flag] = {}
        for group in groups:
            to = self.add_argument_group(group.title) if group.title else self
            for name, declared in group.declared().items():
                self.declared[name] = dataclasses.replace(
                    declared,
                    choices=tuple(choices.get(name, declared.choices)),
                    default=defaults.get(name, declared.default),
                )
                self.declared[name].add_to(to)


Me = TypeVar("Me", bound="Values")
_NO_FLAGS = ("_frozen", "typed", "on_command_line", "needs")


class Values(argparse.Namespace):
    """The values of flags; read-only after freeze().

    Attributes:
      typed: names of the flags that the command line, the file of --config or a new
        preset set.
      on_command_line: names of those that the command line itself set.
      needs: other flags, without which these have no effect.
    """

    _frozen = False
    typed: frozenset[str] = frozenset()
    on_command_line: frozenset[str] = frozenset()
    needs: Mapping[str, str] = MappingProxyType({})

    def freeze(self: Me) -> Me:
        self.__dict__["_frozen"] = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise AttributeError(
                f"flags are frozen: {name} can't be set to {value!r} during the run"
            )
        super().__setattr__(name, value)

    def replace(self: Me, **changes: Any) -> Me:
        """A frozen copy with other values."""
        return type(self)(**(vars(self) | changes | {"_frozen": False})).freeze()

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in sorted(vars(self).items()) if k not in _NO_FLAGS}
