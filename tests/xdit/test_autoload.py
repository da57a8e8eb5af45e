"""Function that torch calls at the end of its import: the processes it acts on, and those that it leaves alone."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from dbsp_cli.autoload import autoload, requested
from tests.support.programs import run
from tests.support.repository import child_environment

FLAG = ["--model", "m", "--sp-backend", "dbsp"]


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (["python", "/venv/bin/xdit", *FLAG], 5, True),
        (["python", "-u", "-m", "xfuser.runner", *FLAG], 5, True),
        (["python", "-m", "xfuser.cli", "--sp_backend=dbsp"], 2, True),
        (["python", "/venv/bin/xdit", "--help"], 2, True),
        (["python", "/venv/bin/xdit", "--model", "m"], 3, False),
        (["python", "-m", "torch.distributed.run", "-m", "xfuser.runner", *FLAG], 7, False),
        (["python", "-W", "xdit", "train.py", *FLAG], 5, False),
        (["python", "-c", "import torch", "xdit", *FLAG], 6, False),
        (["python"], 1, False),
    ],
)
def test_xfuser_run_with_a_db_sp_flag_or_help_is_recognized_and_no_other(command, words, expected):
    assert bool(requested(command, words)) is expected


def test_torch_import_without_the_flag_imports_and_prints_nothing(tmp_path):
    """Tries a run of xfuser's own."""
    (tmp_path / "xdit").write_text(
        "import sys, torch\nfrom dbsp_cli.autoload import autoload\nautoload()\n"
        "names = ('dbsp_core', 'dbsp_diffusers', 'dbsp_kernels', 'dbsp_xdit.runner')\n"
        "print([name for name in sys.modules if name.startswith(names)])\n"
    )
    line = [sys.executable, tmp_path / "xdit", "--model", "m", "--prompt", "--help me"]
    done = run(line, env=child_environment(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_failure_in_an_xfuser_run_is_one_line(monkeypatch, capfd):
    def broken() -> None:
        raise ImportError("no memory")

    monkeypatch.setattr("dbsp_xdit.runner.install", broken)
    monkeypatch.setattr(sys, "orig_argv", ["python", "xdit", *FLAG])
    monkeypatch.setattr(sys, "argv", ["xdit", *FLAG])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    autoload()
    assert capfd.readouterr().err == "dbsp: not loaded into this xfuser run: ImportError: no memory\n"


@pytest.mark.parametrize("off", [False, True])
def test_autoload_can_be_turned_off(monkeypatch, off):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "para_attn.context_parallel.diffusers_adapters", raising=False)
    monkeypatch.setenv("DBSP_AUTOLOAD", "0" if off else "1")
    before = len(sys.meta_path)
    autoload()
    assert len(sys.meta_path) == before + (not off)


def test_failure_is_reported_and_para_attn_stays_importable(monkeypatch, capfd):
    def broken(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "para_attn.context_parallel.diffusers_adapters", SimpleNamespace())
    monkeypatch.setattr(importlib, "import_module", broken)
    autoload()
    assert capfd.readouterr().err == "dbsp: not loaded into para-attn: ImportError: no dbsp_para\n"
