"""What torch calls at the end of its import: whom it acts on, and what scripts with our flags are told."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dbsp_cli.autoload import autoload
from dbsp_diffusers.patching import PatchSet
from dbsp_xdit.command_line import FLAGS, dbsp_requested, full_name, is_xfuser_run
from dbsp_xdit.flags import add_flags, parse_known
from dbsp_xdit.models import preflight
from dbsp_xdit.patches import _patch_parser
from tests.support.repository import child_environment


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-W", "ignore", "/venv/bin/xdit"], True),
        (["python", "-Wignore", "-X", "dev", "-m", "xfuser.runner"], True),
        (["python", "-Xdev", "-um", "xfuser.runner"], True),
        (["python", "-uW", "ignore", "/venv/bin/xdit"], True),
        (["python", "--check-hash-based-pycs", "always", "/venv/bin/xdit"], True),
        (["python", "-W", "xdit", "train.py"], False),
        (["python", "-c", "import torch", "xdit"], False),
        (["python", "-", "xdit"], False),
        (["python", "-m", "pytest", "xdit"], False),
    ],
)
def test_python_s_own_options_stand_before_the_program(command, expected):
    assert is_xfuser_run(command) is expected


@pytest.mark.parametrize("flag", ["--sp-back", "--sp_b", "--sp-backen"])
def test_an_abbreviated_flag_is_the_flag_as_for_xfuser_s_parser(flag):
    for words in ([flag, "dbsp"], [f"{flag}=dbsp"]):
        assert dbsp_requested(["xdit", *words])
        assert parse_known(words)["sp_backend"] == "dbsp"
        with pytest.raises(ValueError, match="did you mean 'radial'"):
            preflight([*words, "--sp-c", "radail:width=1", "--model", "m"])
    assert not dbsp_requested(["xdit", flag, "usp"])


def test_every_flag_is_known_to_who_must_not_import_the_parser():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    assert tuple(option for action in parser._actions for option in action.option_strings) == FLAGS
    assert full_name("--sp_") == "--sp_", "which of them is not said"
    assert full_name("--split_scheme") == "--split_scheme"


class Parser(argparse.ArgumentParser):
    """As xfuser has one."""


class TestScripts:
    """They take xfuser's arguments by `xFuserArgs.add_cli_args`, and make the pipeline themselves."""

    @pytest.fixture
    def parser(self):
        patches = PatchSet()
        _patch_parser(SimpleNamespace(FlexibleArgumentParser=Parser), patches)
        yield Parser()
        patches.detach()
        assert "parse_args" not in vars(Parser)

    def test_our_flag_is_refused_in_one_line(self, parser, capfd):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--sp-backend", "dbsp"])
        assert ended.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("dbsp: error: --sp-backend dbsp is for the command xdit; ")
        assert "call dbsp_xdit.attach(pipe, config)" in line

    def test_a_flag_of_their_own_is_theirs(self, parser):
        parser.add_argument("--sp-backend")
        assert parser.parse_args(["--sp-backend", "dbsp"]).sp_backend == "dbsp"

    def test_without_our_flag_nothing_changes(self, parser):
        parser.add_argument("--model")
        assert parser.parse_args(["--model", "m"]).model == "m"

    def test_they_are_found_by_their_command_line(self, tmp_path):
        """xfuser is a stand-in: the real one wants a GPU."""
        package = tmp_path / "xfuser" / "config"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        parser = "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser): ...\n"
        (package / "args.py").write_text(parser)
        (tmp_path / "script.py").write_text(
            "import torch\nfrom dbsp_cli.autoload import autoload\nautoload()\n"
            "from xfuser.config.args import FlexibleArgumentParser\nFlexibleArgumentParser().parse_args()\n"
        )
        script = [sys.executable, str(tmp_path / "script.py"), "--sp-back", "dbsp"]
        done = subprocess.run(script, env=child_environment(tmp_path), capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("dbsp: error: --sp-backend dbsp is for the command xdit")
        assert "usage:" not in done.stderr


@pytest.mark.parametrize("off", [False, True])
def test_it_can_be_turned_off(monkeypatch, off):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "para_attn.context_parallel.diffusers_adapters", raising=False)
    monkeypatch.setenv("DBSP_AUTOLOAD", "0" if off else "1")
    before = len(sys.meta_path)
    autoload()
    assert len(sys.meta_path) == before + (not off)


def test_what_fails_is_said_and_para_attn_stays_importable(monkeypatch, capfd):
    def broken(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "para_attn.context_parallel.diffusers_adapters", SimpleNamespace())
    monkeypatch.setattr(importlib, "import_module", broken)
    autoload()
    assert capfd.readouterr().err == "dbsp: para-attn does not learn attn: ImportError: no dbsp_para\n"
