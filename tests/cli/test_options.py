"""The size of the command line: options of all commands, and how long each command's help is."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from dbsp_cli.cli import app

MOST_OPTIONS = {"generate": 18, "others": 22}
"""Together 40."""
MOST_LINES = 40


def commands(command: Any, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command by its words, groups included."""
    found = {words: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, (*words, name))
    return found


COMMANDS = commands(typer.main.get_command(app))


def options_of(command: Any) -> list[str]:
    return [one.name for one in command.params if one.param_type_name == "option" and one.name != "help"]


def test_all_commands_together_have_at_most_40_options():
    counted = {" ".join(words) or "dbsp": options_of(command) for words, command in COMMANDS.items()}
    others = {name: options for name, options in counted.items() if name != "generate"}
    assert sum(map(len, others.values())) <= MOST_OPTIONS["others"], others
    assert len(counted["generate"]) <= MOST_OPTIONS["generate"], counted["generate"]


@pytest.mark.parametrize("words", [words for words in COMMANDS if words != ("generate",)], ids=" ".join)
def test_help_fits_a_screen(dbsp, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = dbsp(*words, "--help")
    assert code == 0
    assert out.count("\n") <= MOST_LINES
