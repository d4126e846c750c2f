"""What a line of torchbeast/flags.py declares: type, default, range, class, help."""

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

# What a resumed run does with a flag, see torchbeast/flags.py.
Resume = enum.Enum("Resume", ["START", "FREE", "TUNE"])
START, FREE, TUNE = Resume


class Range(NamedTuple):
    """A closed interval, and its description in words."""

    low: float
    high: float
    words: str


LARGEST_STEP = 2**63 - 1
_LARGEST, _SMALLEST = sys.float_info.max, math.ulp(0.0)  # finite, and above 0
COUNT = Range(1, 2**31 - 1, f"at least 1 and at most {2**31 - 1}")
COUNT_OR_0 = Range(0, 2**31 - 1, f"at least 0 and at most {2**31 - 1}")
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
    """A declared flag; the object of the flags has its value."""

    default: Any
    help: str
    range: Range | None = None
    resume: Resume | None = None
    choices: Sequence[str] = ()
    alias: str | None = None
    metavar: str | None = None
    needs: str | None = None  # another flag, without which it has no effect
    converter: Callable[[str], Any] = str  # of a text; by default the declared type
    name: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        of = typing.get_type_hints(owner)[name]
        kinds = [x for x in typing.get_args(of) or [of] if x is not type(None)]
        object.__setattr__(self, "name", name)
        if self.converter is str:
            object.__setattr__(self, "converter", kinds[0])

    def __get__(self, flags: Any, owner: type) -> Any:
        if flags is None:
            return self
        # Values are in the object's __dict__, where Python looks first.
        raise AttributeError(f"this script has no flag {self.name}")

    def from_file(self, value: Any, place: str = "a file") -> Any:
        """The value that TOML, JSON or a checkpoint has, as if typed, or FlagError.

        A list of texts is joined by commas. None means that the flag was left out.
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
            value = self.converter(str(value))
            if self.choices and value not in self.choices:
                raise ValueError(f"it is not one of {', '.join(self.choices)}")
            return value
        except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
            what = f"{place}: the flag {self.name} is {value!r:.80}"
            raise FlagError(f"{what}: {error}") from None


def flag(default: Any, help: str, *marks: Range | Resume, **more: Any) -> Any:
    """Declares a flag in a class. It counts as Any: mypy takes the attribute's type."""
    more |= {"range" if isinstance(x, Range) else "resume": x for x in marks}
    return Flag(default, help, **more)


def json_object(text: str) -> str:
    """Checks a JSON object, for argparse. Returns it with sorted names."""
    try:
        return json.dumps({**json.loads(text)}, sort_keys=True)
    except (ValueError, TypeError, RecursionError) as error:
        why = f"{text!r:.80} is no object: {error}"
        raise argparse.ArgumentTypeError(why) from None


class Group:
    """Flags under one title of --help: a class whose attributes are declared flags."""

    title: str | None = None

    @classmethod
    def declared(cls) -> dict[str, Flag]:
        return {name: x for name, x in vars(cls).items() if isinstance(x, Flag)}


class FlagParser(argparse.ArgumentParser):
    """Gives typed flags only. `choices` and `defaults` replace those declared."""

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
            for name, x in group.declared().items():
                self.declared[name] = x = dataclasses.replace(
                    x,
                    choices=tuple(choices.get(name, x.choices)),
                    default=defaults.get(name, x.default),
                )
                words: dict[str, Any] = {"help": x.help.replace("%", "%%")}
                if x.default is not None:
                    words["help"] += f" (default: {x.default})"
                if x.converter is bool:
                    words["action"] = argparse.BooleanOptionalAction
                else:
                    words |= {"type": x.converter, "metavar": x.metavar}
                    words["choices"] = x.choices or None
                names = [f"--{n}" for n in (name, x.alias) if n]
                to.add_argument(*names, **words).default = argparse.SUPPRESS


Me = TypeVar("Me", bound="Values")


class Values(argparse.Namespace):
    """The values of flags; read-only after freeze()."""

    _frozen = False
    # Names of those that the user gave, also in a file or by a new preset.
    typed: frozenset[str] = frozenset()
    # Typed flags that have no effect without another one, and its name.
    idle: Mapping[str, str] = MappingProxyType({})

    def freeze(self: Me) -> Me:
        self.__dict__["_frozen"] = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise AttributeError(f"flags are frozen: {name} can't be set")
        super().__setattr__(name, value)

    def replace(self: Me, **changes: Any) -> Me:
        """A frozen copy with other values."""
        return type(self)(**(vars(self) | changes | {"_frozen": False})).freeze()

    def as_dict(self) -> dict[str, Any]:
        own = ("_frozen", "typed", "idle")
        return {k: v for k, v in sorted(vars(self).items()) if k not in own}
