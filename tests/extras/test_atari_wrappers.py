import sys

import ale_py
import ale_py.roms
import cv2
import gymnasium
import numpy as np
import pytest
from small_envs import env_flags, here

from torchbeast.envs.environment import Environment
from torchbeast.envs.extra_fields import GAME_OVER
from torchbeast.extras.envs.atari import atari_game, make_atari, make_atari_vec
from torchbeast.local.actors import actor_context

# The native path draws the number of no-ops with the C++ standard library, which
# differs between platforms.
NOOP_MAX = 30 if sys.platform == "linux" else 0


def atari_flags(env, **changes):
    return env_flags(env, **{"noop_max": NOOP_MAX, **changes})


@pytest.mark.parametrize(
    ("env_id", "game"),
    [
        ("PongNoFrameskip-v4", "pong"),
        ("SpaceInvadersDeterministic-v0", "space_invaders"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("UpNDown-v4", "up_n_down"),
        ("Blackjack-v1", None),  # Gymnasium's; Atari has one, too
        ("MinAtar/Breakout-v1", None),
        ("Combat-v4", None),  # two players; loading it would end the process
        ("package.module:Pong-v4", None),
    ],
)
def test_atari_game(env_id, game):
    assert atari_game(env_id) == game


@pytest.mark.parametrize(
    ("game", "steps", "expected", "changes"),
    [
        ("Pong", 120, set(), {"sticky_actions": 0.25, "full_action_space": True}),
        ("Breakout", 150, {"life", "game"}, {"sticky_actions": 0.25}),
        ("Breakout", 190, {"game"}, {"life_loss": False}),
        ("Seaquest", 330, {"life", "game"}, {}),
        ("SpaceInvaders", 240, {"life", "truncated"}, {"max_episode_frames": 902}),
        ("Frogger", 310, {"life", "no lives", "game"}, {}),
        ("Freeway", 60, {"truncated"}, {"frame_skip": 2, "max_episode_frames": 80}),
    ],
)
def test_native_and_python_agree(game, steps, expected, changes):
    """Same frames, rewards, ends, lives, for the same seeds and actions."""
    flags = atari_flags(f"{game}NoFrameskip-v4", **changes)
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    python = gymnasium.vector.SyncVectorEnv(
        [lambda: make_atari(flags)] * 2, autoreset_mode=same_step
    )
    native = make_atari_vec(flags, 2)
    assert native.single_observation_space == python.single_observation_space
    assert native.single_action_space == python.single_action_space

    # With 30 no-ops at most these draw other numbers than with 29 or 31.
    seeds = [24, 28]
    observation, info = python.reset(seed=seeds)
    native_observation, native_info = native.reset(seed=seeds)
    np.testing.assert_array_equal(native_observation, observation)
    np.testing.assert_array_equal(native_info["lives"], info["lives"])

    rng = np.random.default_rng(3)
    seen = set()
    for t in range(steps):
        if t % 2 == 0:
            action = rng.integers(0, python.single_action_space.n, 2)
        observation, reward, terminated, truncated, info = python.step(action)
        row = native.step(action)
        for ours, theirs in zip(
            (observation, reward, terminated, truncated), row, strict=False
        ):
            np.testing.assert_array_equal(theirs, ours, err_msg=f"step {t}")
        np.testing.assert_array_equal(row[4]["lives"], info["lives"])

        done = terminated | truncated
        if (info["lives"] == 0)[~done].any():
            seen.add("no lives")
        for e in np.flatnonzero(done):
            final, native_final = info["final_info"], row[4]["final_info"]
            game_over = final[GAME_OVER][e] if flags.life_loss else True
            assert native_final["game_over"][e] == game_over
            assert native_final["lives"][e] == final["lives"][e]
            seen.add("game" if game_over and terminated[e] else "")
            seen.add("life" if not game_over else "")
            if truncated[e]:
                seen.add("truncated")
                np.testing.assert_array_equal(
                    row[4]["final_obs"][e], info["final_obs"][e]
                )
                assert not np.array_equal(info["final_obs"][e], observation[e])
    # Otherwise the test would have compared nothing.
    assert expected <= seen
    python.close()
    native.close()


def test_python_path_against_the_bare_emulator():
    """Compares with a second implementation, on the emulator's screens."""
    seed, skip = 5, 4
    env = make_atari(atari_flags("Pong-v4", noop_max=0, sticky_actions=0.3))
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.3)
    ale.loadROM(ale_py.roms.get_rom_path("pong"))
    ale.reset_game()
    ale.act(ale_py.Action.FIRE)

    def shrink(screen):
        return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)

    observation, _ = env.reset(seed=seed)
    frames = [np.zeros((84, 84), np.uint8)] * 3 + [shrink(ale.getScreenGrayscale())]
    np.testing.assert_array_equal(observation, np.stack(frames))

    total = 0
    for action in np.random.default_rng(0).integers(0, 6, 70):
        observation, reward, *_ = env.step(action)
        screens, expected_reward = [], 0
        for _ in range(skip):
            expected_reward += ale.act(ale.getMinimalActionSet()[action])
            screens.append(ale.getScreenGrayscale())
        frames = [*frames[1:], shrink(np.maximum(screens[-2], screens[-1]))]
        np.testing.assert_array_equal(observation, np.stack(frames))
        assert reward == expected_reward
        total += reward
    assert total < 0
    env.close()


@pytest.mark.parametrize(("game", "least"), [("Breakout", 1), ("Freeway", 0)])
def test_noops_are_uniform(game, least):
    """0 to noop_max frames before the agent's first action, including FIRE."""
    flags = atari_flags(f"{game}-v4", noop_max=3)
    python, native = make_atari(flags), make_atari_vec(flags, 2)
    python.reset(seed=1)
    native.reset(seed=[1, 2])
    counts = [python.reset()[1]["episode_frame_number"] for _ in range(100)]
    native_counts = np.concatenate(
        [native.reset()[1]["episode_frame_number"] for _ in range(50)]
    )
    for frames in (counts, native_counts):
        found = np.bincount(frames, minlength=4)
        expected = np.full(4, 100 / 4)
        if least == 1:
            expected[:2] = 0, 2 * 100 / 4
        assert found.shape == expected.shape
        # Binomial with a standard deviation of 5 at most.
        np.testing.assert_allclose(found, expected, atol=15)
        np.testing.assert_array_equal(found == 0, expected == 0)
    native.close()


def cut_after_eleven(env):
    return gymnasium.wrappers.TimeLimit(env, 11)


def test_a_wrapper_may_end_the_game():
    flags = env_flags("Breakout-v4", life_loss=True, wrapper=here(cut_after_eleven))
    env = Environment(flags, 1)
    env.initial()
    for step in range(1, 34):
        row = env.step(np.array([0]))  # no ball, so no life is lost
        assert row["truncated"][0] == row["game_over"][0] == (step % 11 == 0)
        assert row["game_step"][0] == (step - 1) % 11 + 1
    env.close()


def test_actors_share_the_memory_of_the_emulators_packages():
    with actor_context().Pool(1) as pool:
        loaded = pool.apply_async(eval, ("'ale_py' in __import__('sys').modules",))
        assert loaded.get(60)
