"""The flags of a run are read-only, also in the processes that get a copy."""

import copy
import pickle

import pytest
from test_flags import parse, resolve

from torchbeast.flags import Flags


def test_frozen_flags_refuse_assignment():
    flags = parse("--batch_size 5")
    flags.batch_size = 6
    assert flags.freeze() is flags
    with pytest.raises(AttributeError, match="batch_size can't be set"):
        flags.batch_size = 7
    with pytest.raises(AttributeError, match="new can't be set"):
        flags.new = 1
    assert flags.batch_size == 6
    assert "new" not in flags.as_dict()


def test_replace_gives_a_frozen_copy():
    flags = parse().freeze()
    other = flags.replace(seed=123)
    assert (other.seed, flags.seed) == (123, 1)
    assert {**other.as_dict(), "seed": 1} == flags.as_dict()
    with pytest.raises(AttributeError):
        other.seed = 2


@pytest.mark.parametrize(
    "copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy]
)
def test_copies_stay_frozen(copied):
    """Actors get the flags pickled."""
    flags = resolve("--preset minatar").freeze()
    other = copied(flags)
    assert other is not flags
    assert type(other) is Flags
    assert other.as_dict() == flags.as_dict()
    with pytest.raises(AttributeError):
        other.seed = 2
    open_flags = copied(parse())
    open_flags.seed = 2
    assert open_flags.seed == 2
