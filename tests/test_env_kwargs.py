"""--env_kwargs and --wrapper in whole runs, in both variants."""

import gymnasium
import pytest
import runs


class Sized(gymnasium.Env):
    """Episodes of 4 steps; `size` is the reward and the length of an observation."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size):
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,))
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(self.size, "float32"), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.random(self.size, "float32")
        return observation, float(self.size), False, self.steps == 4, {}


def ten_times(env):
    return gymnasium.wrappers.TransformReward(env, lambda reward: 10 * reward)


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_they_reach_the_environments_and_a_resumed_run(tmp_path, module):
    if module.endswith("polybeast"):
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    flags = {
        **runs.SMALL,
        "module": module,
        "batch_size": 3,
        "env": "test_env_kwargs:Sized",
        "env_kwargs": '{"size": 7}',
        "wrapper": "test_env_kwargs:ten_times",
    }
    runs.run(tmp_path, "a", **flags)
    runs.run(tmp_path, "a", module=module, total_steps=900)
    rows = runs.read_logs(tmp_path, "a")
    assert int(rows[-1]["step"]) >= 900
    returns = {row["mean_game_return"] for row in rows} - {""}
    assert {float(x) for x in returns} == {4 * 70.0}
    # A checkpoint names code that is not trusted.
    flags = {"total_steps": 1200, "no-trust_checkpoint_env": True, "env": flags["env"]}
    process = runs.start(tmp_path, "a", module=module, **flags)
    output = runs.finish(process)
    assert process.returncode == 1
    assert "names --wrapper test_env_kwargs:ten_times" in output
    assert "forbids to import the module test_env_kwargs" in output
