"""A notebook: plays an episode with a checkpoint's agent, at most 300 steps.

python -m played FOLDER
"""

import sys

import numpy as np

from torchbeast import load_agent
from torchbeast.base.nested import flatten, map_nested
from torchbeast.core.acting import row_spec
from torchbeast.core.rollout import env_fields


def main(folder: str) -> None:
    agent = load_agent(folder)
    fields = row_spec(agent.model)
    own = fields.keys() - env_fields(agent.observation_space, agent.model.distribution)
    env = agent.make_env()
    observation, info = env.reset(seed=1)
    state, reward, over, steps = None, 0.0, False, 0
    while not over and steps < 300:
        action, state, outputs = agent.act(
            observation, state, reward, fields=info, outputs=True
        )
        if outputs.keys() != own:
            raise ValueError(f"outputs {sorted(outputs)}, fields {sorted(own)}")
        finite = map_nested(lambda x: np.isfinite(x).all(), outputs["baseline"])
        if not all(flatten(finite)):
            raise ValueError(f"the values are {outputs['baseline']}")
        observation, reward, terminated, truncated, info = env.step(action)
        over, steps = terminated or truncated, steps + 1
    sys.stdout.write(f"played {steps} steps\n")


if __name__ == "__main__":
    main(sys.argv[1])
