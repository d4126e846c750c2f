"""The flags of a run are read-only, also in the processes that get a copy."""

import copy
import pickle

import pytest
from test_flags import parse, resolve

from torchbeast.flags import Flags


@pytest.mark.parametrize(
    "copied",
    [
        *(lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy),
        lambda x: x.replace(seed=x.seed),
    ],
)
def test_frozen_flags_and_their_copies_refuse_assignment(copied):
    flags = resolve("--preset minatar")
    flags.seed = 3
    assert flags.freeze() is flags
    other = copied(flags)
    assert other is not flags
    assert type(other) is Flags
    assert other.as_dict() == flags.as_dict()
    for name in ("seed", "new"):
        with pytest.raises(AttributeError, match=f"{name} can't be set"):
            setattr(other, name, 2)
    assert other.replace(seed=5).seed == 5
    assert (other.seed, "new" in other.as_dict()) == (3, False)
    open_flags = copy.copy(parse())
    open_flags.seed = 2
    assert open_flags.seed == 2
