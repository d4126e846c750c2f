import json

import gymnasium
import pytest

from torchbeast import monobeast
from torchbeast.runs import flagset
from torchbeast.tools import protocol


def find(*words):
    flags = flagset.parse(monobeast.make_parser(), words)
    return protocol.find_protocol(flags.as_dict())


def test_atari_by_presets():
    published = find("--preset", "impala-atari")
    assert published == {
        "env": "Atari pong",
        "frame_skip": 4,
        "noop_max": 30,
        "sticky_actions": 0.0,
        "full_action_space": False,
        "life_loss": True,
        "max_episode_frames": 108_000,
        "reward_clipping": "abs_one",
    }
    assert find("--preset", "sticky-atari")["sticky_actions"] == 0.25
    assert protocol.describe({"env": "Atari pong", "frame_skip": 4}) == (
        "Atari pong, frame_skip 4"
    )


def test_the_form_of_an_id_and_other_flags_change_nothing():
    for words in (
        ("--env", "ALE/Pong-v5", "--seed", "7"),
        ("--env", "Pong-v4", "--atari_backend", "python", "--learning_rate", "1"),
    ):
        assert find(*words) == find()
    assert find("--env", "Qbert-v4") != find()


def test_what_changes_an_environment_is_part_of_its_protocol():
    found = find(
        *("--env", "MinAtar/Asterix-v1", "--reward_clipping", "none", "--env_kwargs"),
        '{"sticky_action_prob": 0.0, "difficulty_ramping": false, "depth": 2}',
        *("--wrapper", "mine:wrap", "--mask_actions"),
    )
    assert found == {
        "env": "MinAtar/Asterix-v1",
        "sticky_actions": 0.0,
        "full_action_space": False,
        "difficulty_ramping": False,
        "env_kwargs": '{"depth": 2}',
        "wrapper": "mine:wrap",
        "mask_actions": True,
        "reward_clipping": "none",
    }
    harder = find("--env_kwargs", '{"difficulty": 1}', "--atari_backend", "python")
    assert harder == find() | {"env_kwargs": '{"difficulty": 1}'}


@pytest.mark.parametrize(
    "arguments", [{}, {"difficulty_ramping": False, "use_minimal_action_set": True}]
)
@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("name", ["Asterix", "Breakout"])
@pytest.mark.filterwarnings("ignore:.*out of date")
def test_minatar_plays_as_its_protocol_says(name, version, arguments):
    pytest.importorskip("minatar")
    from minatar.gym import register_envs

    if "MinAtar/Breakout-v1" not in gymnasium.registry:
        register_envs()
    env = gymnasium.make(f"MinAtar/{name}-{version}", **arguments)
    words = ("--env", f"MinAtar/{name}-{version}", "--env_kwargs")
    found = find(*words, json.dumps(arguments))
    game = env.unwrapped.game
    assert game.sticky_action_prob == found["sticky_actions"]
    assert found.get("difficulty_ramping") == getattr(game.env, "ramping", None)
    minimal = len(game.minimal_action_set())
    actions = game.num_actions() if found["full_action_space"] else minimal
    assert env.action_space.n == actions
