"""--config: flags from a TOML file, or from a run's meta.json."""

import json

import pytest

from torchbeast import monobeast
from torchbeast.base.errors import FlagError
from torchbeast.extras.config import OF_ITS_RUN
from torchbeast.runs import flagset, trust
from torchbeast.runs.files import strict_json
from torchbeast.runs.trust import UntrustedError


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns --config with it."""

    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return f"--config={path}"

    return write


def parse(*argv):
    return flagset.parse(monobeast.make_parser(), argv)


def polybeast_parser():
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    from torchbeast.polybeast import start

    return start.make_parser()


def test_every_kind_of_flag(write):
    config = write(
        """
        env = "a:B"
        seed = 7
        learning_rate = 1e-4
        clip_ratio = inf
        use_lstm = true
        life_loss = false
        greedy = false
        model = "deep"
        [env_kwargs]
        size = 3
        names = ["x"]
        """
    )
    flags = parse(config, "--trust_checkpoint_env")
    assert (flags.env, flags.seed, flags.learning_rate) == ("a:B", 7, 0.0001)
    assert flags.clip_ratio == float("inf")
    assert (flags.use_lstm, flags.life_loss, flags.greedy) == (True, False, False)
    assert json.loads(flags.env_kwargs) == {"size": 3, "names": ["x"]}
    assert {"seed", "life_loss", "env_kwargs"} <= flags.typed


def test_the_command_line_wins_and_the_preset_loses(write):
    config = write('preset = "minatar"\nbatch_size = 3\nentropy_cost = 0.5\n')
    flags = parse("--batch_size=5", config)
    assert (flags.batch_size, flags.entropy_cost) == (5, 0.5)
    assert flags.env == "MinAtar/Breakout-v1"


def test_a_checkpoint_loses(write):
    saved = {"flags": parse("--seed=3", "--entropy_cost=0.2").as_dict()}
    config = write("seed = 4")
    flags = flagset.merge(flagset.read(monobeast.make_parser(), [config]), saved)
    assert (flags.seed, flags.entropy_cost) == (4, 0.2)


@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("sed = 3", "a.toml", "there is no flag sed"),
        ("seed = ", "a.toml", "a.toml: Invalid value"),
        ('use_lstm = ["a"]', "a.toml", r"use_lstm is \['a'\]"),
        ('model = "huge"', "a.toml", "model is 'huge': it is not one of shallow, deep"),
        ("{", "meta.json", "meta.json: "),
        ('{"args": {}, "flags_left_open": 3}', "meta.json", "meta.json: TypeError"),
        ("[" * 90_000, "meta.json", "maximum recursion depth"),
        ("seed = " + "[" * 5_000, "a.toml", "maximum recursion depth"),
        ("seed = 2020-01-01", "a.toml", r"a\.toml: the flag seed is "),
        (f"env_kwargs = '{'[' * 9000}'", "a.toml", "no object: maximum recursion"),
        ("env_kwargs = {a = 07:32:00}", "a.toml", "env_kwargs is .*time"),
    ],
)
def test_files_that_can_not_be_used(write, text, name, match):
    with pytest.raises(FlagError, match=match):
        parse(write(text, name))


def test_the_flags_of_another_variant_are_left_out(write):
    args = {"num_servers": 3, "seed": 9, "savedir": "/a", "xpid": "b", "video": None}
    config = write(json.dumps({"args": args}), "meta.json")
    flags = parse(config)
    assert flags.seed == 9
    assert (flags.xpid, "num_servers" in flags.as_dict()) == (None, False)
    assert flagset.parse(polybeast_parser(), [config]).num_servers == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["--checkpoint_interval=30"],
        ["--disable_checkpoint"],
        ["--eval_interval=5000", "--eval_episodes=3"],
        ["--preset=laser-atari"],
    ],
)
def test_no_flag_of_a_run_is_refused_in_its_repetition(write, argv):
    """A repetition has all flags of its run, also those that had no effect in it."""
    args = flagset.resolve(parse(*argv)).as_dict()
    config = write(json.dumps({"args": args}), "meta.json")
    same = flagset.resolve(parse(config)).as_dict()
    assert {**same, "config": None} == args
    for other in ("--disable_checkpoint", "--preset=minatar", "--replay_ratio=0"):
        flagset.resolve(parse(config, other))


def test_a_flag_without_effect_is_refused_beside_a_file(write):
    args = flagset.resolve(parse()).as_dict()
    config = write(json.dumps({"args": args}), "meta.json")
    with pytest.raises(FlagError, match="--eval_episodes has no effect"):
        flagset.resolve(parse(config, "--eval_episodes=7"))


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("env", "os:remove", "--env=CartPole-v1"),
        ("env", "antigravity:CartPole-v1", "--env=CartPole-v1"),
        ("wrapper", "a:b", "--wrapper="),
        ("env_kwargs", '{"path": "x"}', "--env_kwargs={}"),
        ("replay_file", "x", "--replay_file=mine"),
        ("video", "x.mp4", "--video=mine.mp4"),
        ("savedir", "x", "--savedir=mine"),
        ("checkpoint", "../x", "--checkpoint=model.tar"),
        ("init_from", "x", "--init_from=mine"),
        ("insecure", True, "--no-insecure"),
        ("token_file", "x", "--token_file=mine"),
        ("server_addresses", "x:1", "--server_addresses=mine:1"),
    ],
)
@pytest.mark.parametrize("kind", ["toml", "meta.json"])
def test_what_a_file_names_is_used_only_with_trust(write, name, value, typed, kind):
    """A file may come from somebody else. What was typed instead is fine."""
    parser = polybeast_parser()
    if kind == "toml":
        config = write(f"{name} = {json.dumps(value)}")
    else:
        meta = {"args": {name: value}, "flags_signature": "0" * 64}
        config = write(json.dumps(meta), kind)
        if name in OF_ITS_RUN:
            flags = flagset.parse(parser, [config])
            assert getattr(flags, name) == parser.declared[name].default
            return
    with pytest.raises(UntrustedError, match=f"{config[9:]} names --{name}"):
        flagset.parse(parser, [config])
    flagset.parse(parser, [config, typed])
    flagset.parse(parser, [config, "--trust_checkpoint_env"])


def test_a_file_does_not_trust_itself(write):
    config = write('trust_checkpoint_env = true\nenv = "os:remove"')
    with pytest.raises(FlagError, match="no flag trust_checkpoint_env"):
        parse(config)
    args = {"trust_checkpoint_env": True, "env": "os:remove"}
    with pytest.raises(UntrustedError):
        parse(write(json.dumps({"args": args}), "meta.json"))


def test_a_run_of_ones_own_is_repeated(write):
    args = parse("--env=a:B", "--env_kwargs={}", "--clip_ratio=inf").as_dict()
    meta = {"args": strict_json(args), "flags_signature": trust.sign(args)}
    config = write(json.dumps(meta), "meta.json")
    assert parse(config).env == "a:B"
    meta["args"]["wrapper"] = "os:remove"
    with pytest.raises(UntrustedError, match="os"):
        parse(write(json.dumps(meta), "meta.json"))
