"""For programs with a loop of their own: begin(), step() and end() ask a learner.

    with Caller("learner:5000", observation_space, action_space) as agent:
        action = agent.begin(observation)
        while ...:
            action = agent.step(reward, observation)
        agent.end(reward)

Each episode joins the learner as a client of its own, and the next one goes on with its
unroll. So the learner waits for no step while the program rests between two episodes.
"""

import contextlib
import queue
import sys
import threading
from typing import Any

import gymnasium as gym
import numpy as np

import libtorchbeast
from torchbeast.base.nested import map_nested
from torchbeast.envs.environment import to_env_actions
from torchbeast.envs.values import plain_space, policy_space, read


class RunComplete(Exception):
    """The learner has completed its run."""


class Episode:
    """One episode as an environment, whose step() waits for the program."""

    num_envs = 1

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = plain_space(observation_space)
        self.action_space, self.env_space = policy_space(action_space), action_space
        kind = np.float32 if isinstance(action_space, gym.spaces.Box) else np.int64
        self.last_action = np.zeros((1, *(self.action_space.shape or ())), kind)
        self.final_observation: Any = None
        self.steps, self.total = -1, 0.0
        self.rows: Any = queue.SimpleQueue()  # None: the program has left
        self.actions: Any = queue.SimpleQueue()  # at last, how the stream has ended

    def observe(self, observation: Any) -> None:
        value = read(self.observation_space, observation)
        self.observation = map_nested(lambda x: np.asarray(x)[None], value)

    def ask(self, reward: float, done: bool = False) -> Any:
        """In the program's thread. Returns the action; None at the end."""
        self.steps, self.total = self.steps + 1, self.total + reward
        row = {"reward": np.float32(reward), "done": np.bool_(done)}
        row |= {"truncated": np.bool_(self.final_observation is not None)}
        row |= {"episode_return": np.float32(self.total)}
        row |= {"episode_step": np.int64(self.steps)}
        row = {name: np.asarray(x)[None] for name, x in row.items()}
        self.rows.put(row | {"observation": self.observation})
        if isinstance(answer := self.actions.get(), Exception):
            self.actions.put(answer)  # for further calls
            raise answer
        return answer

    def initial(self) -> dict[str, Any]:
        if not (row := self.rows.get()):
            raise RuntimeError("the program has left its episode")
        return row | {"last_action": self.last_action}

    def step(self, actions: Any) -> dict[str, Any]:
        self.last_action = np.array(actions)
        self.actions.put(to_env_actions(self.env_space, 1, self.last_action)[0])
        return self.initial()


class Caller:
    """Plays one episode at a time. `words` are libtorchbeast.Client's, as `security`.

    All methods raise RunComplete, or what Client.run() raises.
    """

    def __init__(
        self, address: str, observation_space: Any, action_space: Any, **words: Any
    ) -> None:
        self.address, self.words = address, words
        self.spaces = observation_space, action_space
        self.leave: Any = contextlib.ExitStack()

    def begin(self, observation: Any) -> Any:
        """Begins an episode with its first observation; returns the first action."""
        self.leave.close()
        self.episode = episode = Episode(*self.spaces)
        client = libtorchbeast.Client(lambda: episode, self.address, **self.words)

        def play() -> None:
            end: Any = None
            try:
                client.run(1, here=True)
                if client.stats()["finished"]:
                    end = RunComplete("the learner has completed its run")
            except Exception as error:
                end = error
            episode.actions.put(end)

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        for undo in (thread.join, lambda: episode.rows.put(None)):
            self.leave.callback(undo)
        self.leave.callback(client.stop, 0.0)
        episode.observe(observation)
        return episode.ask(0.0, done=True)

    def step(self, reward: float, observation: Any) -> Any:
        """The reward of the last action and what followed; returns the next action."""
        self.episode.observe(observation)
        return self.episode.ask(reward)

    def end(self, reward: float, last_observation: Any = None) -> None:
        """Ends the episode; returns when the learner has its last step.

        With the last observation if a time limit has ended it, which has a value.
        """
        if last_observation is not None:
            self.episode.observe(last_observation)
            self.episode.final_observation = self.episode.observation
        self.episode.ask(reward, done=True)
        self.leave.close()
        del self.episode

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: Any) -> None:
        self.leave.close()  # an episode in progress is dropped


def main() -> None:
    """An example: this program plays CartPole-v1 until the run is complete."""
    game: Any = gym.make("CartPole-v1")
    spaces = game.observation_space, game.action_space
    with Caller(sys.argv[1], *spaces) as agent, contextlib.suppress(RunComplete):
        while True:
            action = agent.begin(game.reset()[0])
            while True:
                observation, reward, terminated, truncated, _ = game.step(action)
                if terminated or truncated:
                    agent.end(reward, None if terminated else observation)
                    break
                action = agent.step(reward, observation)


if __name__ == "__main__":
    main()
