"""docs/xdit.md: its commands pass xdit's own checks, and it names every checkpoint and every flag."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from dbsp_cli.tiny_models import make_tiny
from dbsp_core.models.table import MODEL_SPECS
from dbsp_xdit.flags import _SWITCHES, add_flags
from dbsp_xdit.models import find_model, preflight
from tests.support.repository import ROOT

REPOSITORY = ROOT
PAGE = (REPOSITORY / "docs" / "xdit.md").read_text()
COMMANDS = re.findall(r"^xdit (?:.*\\\n)*.*", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_its_commands_are_right(tmp_path, monkeypatch, command):
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    make_tiny("cogvideox", tmp_path / "tiny")
    for name in ("first.png", "last.png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    assert "dbsp" in arguments
    preflight(arguments)


def test_it_has_a_command_for_each_model_and_all_their_names():
    models = {re.search(r"--model (\S+)", command)[1] for command in COMMANDS}  # type: ignore[index]
    assert {find_model(name).like.name for name in models - {"./tiny"}} == set(MODEL_SPECS)
    missing = [name for c in MODEL_SPECS.values() for name in c.names if f"`{name}`".casefold() not in PAGE.casefold()]
    assert not missing


def test_it_names_every_flag_and_what_does_not_go_with_them():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = {option.replace("_", "-") for action in parser._actions for option in action.option_strings}
    assert all(f"`{flag}" in PAGE for flag in flags)
    assert all(f"`--{switch}`" in PAGE for switch in _SWITCHES)
