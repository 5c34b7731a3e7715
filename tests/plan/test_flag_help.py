from __future__ import annotations

import re
from typing import Any, List, Sequence

import pytest

from raypod.__main__ import main
from raypod.plan import config, flags
from raypod.system.command_line import FlagParser


def shown(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> List[str]:
    """The flags that have an entry of their own."""
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def test_help_shows_what_is_used_most_and_each_flag_is_in_one_group(capsys: Any) -> None:
    text = shown(capsys, "train", "--help")
    assert 20 <= len(flags_in(text)) <= 24
    assert {"--config", "--task", "--dataset", "--model", "--epochs", "--replicas", "--cluster"} <= {*flags_in(text)}
    assert "--stuck-after-s" not in text
    assert "--help-all every flag" in " ".join(text.split())
    assert text == shown(capsys, "train", "-h")
    assert max(map(len, text.splitlines())) <= 80
    of_groups = [flag for group in flags.GROUPS for flag in flags_in(shown(capsys, "train", "--help", group))]
    assert len(of_groups) == len(set(of_groups))
    keys = {f"--{'task' if key == 'name' else key.replace('_', '-')}" for _, key, _ in config.fields()}
    assert keys <= {*of_groups}
    assert {*flags_in(shown(capsys, "train", "--help-all"))} == {*of_groups, "--config"}


@pytest.mark.parametrize(
    ("group", "lines"),
    [
        ("training", ["--batch-size N micro-batch size: samples per forward pass [integer >= 1; default: 8]"]),
        ("training", ["--seed N", "[integer >= 0, < 2^31; default: 42]"]),
        ("data", ["--augment randomly crop", "[on by default]", "--download", "[off by default]"]),
        ("checkpoints", ["--checkpoint-every INTERVAL", "--save-timeout-s SECONDS", "--resume PATH"]),
        ("failures", ["--on-nonfinite {stop,continue} reaction to a loss that is NaN or infinite [default: stop]"]),
    ],
)
def test_an_entry_has_type_range_and_default(group: str, lines: Sequence[str], capsys: Any) -> None:
    text = " ".join(shown(capsys, "train", "--help", group).split())
    assert all(line in text for line in lines)


def test_an_unknown_group_is_a_mistake_and_other_parsers_keep_their_help(capsys: Any) -> None:
    assert main(["train", "--help", "dta"]) == 2
    groups = "task, data, model, training, ipu, pod, checkpoints, failures, output"
    assert capsys.readouterr().err == f"raypod: error: --help dta: no such group (of {groups}); did you mean data?\n"
    parser = FlagParser(prog="test")
    flags.add_flags(parser)
    assert "--stuck-after-s SECONDS" in parser.format_help()
    assert "--help-all" not in parser.format_help()


@pytest.mark.parametrize(("command", "own"), [("plan", ["--json", "--memory"]), ("doctor", ["--json", "--timeout"])])
def test_help_shows_what_only_this_command_has(command: str, own: List[str], capsys: Any) -> None:
    text = shown(capsys, command, "--help")
    assert {*own} <= {*flags_in(text)}
    assert "Train a model" not in text
