"""Independent random streams from one --seed."""

import numpy as np


def derive_seed(*entropy: int) -> int:
    """One seed from several numbers. Different numbers give independent streams."""
    # The count is included because NumPy treats (1,) and (1, 0) alike.
    sequence = np.random.SeedSequence((len(entropy), *entropy))
    return int(sequence.generate_state(1)[0])
