"""The installed commands while Python is still importing torch, and what each does with a fault of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib import import_module

import pytest

from tests.support.repository import ROOT as REPOSITORY
from tests.support.repository import child_environment

SLOW = "print('importing', flush=True)\nimport time\ntime.sleep(600)\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_during_imports_is_one_line(tmp_path, ignored):
    """torch is a stub that says when it is imported, and takes for ever."""
    (tmp_path / "torch.py").write_text(SLOW if not ignored else SLOW.replace("600", "0") + "raise SystemExit(5)\n")
    run = subprocess.Popen(
        [sys.executable, "-c", "from dbsp_cli.entry import dbsp; dbsp()", "--help"],
        env=child_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert (run.returncode, said) == ((5, "") if ignored else (130, "dbsp: interrupted\n"))


def test_an_interrupt_after_the_imports_is_one_line_too(dbsp, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", interrupted)
    assert dbsp("doctor") == (130, "", "dbsp: interrupted\n")


def test_the_installed_commands_are_there():
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"dbsp"}
    for target in scripts.values():
        module, name = target.split(":")
        assert callable(getattr(import_module(module), name))


class TestFaultsOfOurOwn:
    """They go through as they are: Python then shows the traceback and exits with 1."""

    def test_of_dbsp(self, dbsp, monkeypatch):
        def broken():
            raise IndexError("a fault")

        monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", broken)
        with pytest.raises(IndexError, match="a fault"):
            dbsp("doctor")

    @pytest.mark.parametrize(("error", "ours"), [(IndexError("a fault"), True), (OSError("the disk is full"), False)])
    def test_of_making_a_report_does_not_end_what_has_succeeded(self, monkeypatch, capfd, error, ours):
        from types import SimpleNamespace

        from dbsp_core.reports.observer import RunObserver
        from dbsp_diffusers import report_hook as calls

        monkeypatch.setattr(calls, "make_report", lambda *_: (_ for _ in ()).throw(error))
        calls.report_or_say_why_not(
            [SimpleNamespace(observers=(RunObserver("there"),), layers=1, records={})], "m", "para"
        )
        *before, last = capfd.readouterr().err.splitlines()
        assert last == f"dbsp: no report in there: {error}"
        assert ("Traceback (most recent call last):" in before) is ours
