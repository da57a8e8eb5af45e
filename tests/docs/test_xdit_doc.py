"""docs/xdit.md: its commands pass xdit's own checks, and it names every checkpoint and every flag."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from dbsp_core.models.table import MODEL_SPECS
from dbsp_xdit.command_line import _RIVALS, add_flags, config_from, source_of
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "xdit.md").read_text()
COMMANDS = re.findall(r"^xdit (?:.*\\\n)*.*", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_its_commands_are_right(tmp_path, monkeypatch, command):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    parser = add_flags(argparse.ArgumentParser())
    for name in ("--model", "--prompt", "--output_directory"):
        parser.add_argument(name, required=True)
    for name in ("--ulysses_degree", "--ring_degree", "--height", "--width", "--num_frames", "--num_inference_steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--input_images", nargs="+")
    parser.add_argument("--use_cfg_parallel", action="store_true")
    words = shlex.split(command.replace("\\\n", " "))[1:]
    args = vars(parser.parse_args([word.replace("--sp-", "--sp_") for word in words]))
    assert config_from(args) is not None
    source_of(args["model"])


def test_it_names_all_checkpoints():
    names = [name for spec in MODEL_SPECS.values() for name in spec.names]
    assert not [name for name in names if f"`{name}`".casefold() not in PAGE.casefold()]


def test_it_names_every_flag_and_what_does_not_go_with_them():
    parser = add_flags(argparse.ArgumentParser(add_help=False))
    flags = {option.replace("_", "-") for action in parser._actions for option in action.option_strings}
    assert all(f"`{flag}" in PAGE for flag in flags)
    assert all(f"`--{name}`" in PAGE for name in _RIVALS)
