"""`dbsp doctor`: what it calls ok has been imported; and what the extras install is what their hosts need."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

from dbsp_cli.commands import doctor
from dbsp_cli.commands.doctor import HOSTS, Importable
from dbsp_cli.generate import hosts
from dbsp_kernels import KERNELS
from tests.support.programs import children_forked
from tests.support.repository import ROOT

MISSING = Importable("nothing", ("dbsp_no_such_module",), "xdit")


def test_a_line_says_it_all_and_a_fix_stands_by_whatever_is_not_ok(dbsp):
    with children_forked():
        code, out, err = dbsp("doctor", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    findings = {finding.pop("what"): finding for finding in said["findings"]}
    assert {"db-SP", "python", "torch", "accelerator", "communication", "kernel cpu", "xDiT"} <= set(findings)
    assert all(list(finding) == ["state", "detail", "fix", "ok"] for finding in findings.values())
    assert all(bool(finding["fix"]) != finding["ok"] for finding in findings.values())
    assert said["verdict"].startswith(f"db-SP {findings['db-SP']['detail']} ")
    for host in HOSTS:
        assert (host.what in said["verdict"]) is findings[host.what]["ok"]
    if not torch.cuda.is_available():
        assert findings["kernel triton"]["state"] == findings["accelerator"]["state"] == "not here"
        assert findings["kernel triton"]["detail"] == "needs a GPU"


def test_kernels_that_are_not_here_for_one_reason_are_one_line():
    away = [doctor.Check(f"kernel {name}", "not here", "needs a GPU", "cpu serves") for name in ("a", "b", "c")]
    there = doctor.Check("kernel cpu", "ok", "serves this machine")
    other = doctor.Check("kernel d", "not here", "is for the CPU", "cpu serves")
    device = doctor.Check("accelerator", "not here", "needs a GPU", "cpu serves")
    lines = doctor._together([device, away[0], there, away[1], other, away[2]])
    assert [one.what for one in lines] == ["accelerator", "kernel a, b, c", "kernel cpu", "kernel d"]
    assert lines[1].fix == "cpu serves"


def test_the_table_says_the_same_with_its_brackets(dbsp, monkeypatch):
    monkeypatch.setattr(doctor, "HOSTS", ())
    monkeypatch.setattr(doctor, "_PACKAGES", (MISSING,))
    monkeypatch.setattr(doctor, "verdict", lambda checks: "a verdict")
    code, out, _ = dbsp("doctor")
    assert (code, out.splitlines()[0]) == (0, "a verdict")
    assert "missing   nothing" in out
    assert "lacks dbsp_no_such_module; pip install '.[xdit]' in db-SP's repository\n" in out


def test_what_is_installed_and_cannot_be_imported_is_not_ok(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import dbsp_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = Importable("broken", ("broken_package",), "xdit").check()
    assert check.state == "missing"
    assert check.detail == "cannot be imported: ModuleNotFoundError: No module named 'dbsp_no_such_module'"
    assert check.fix == "pip install '.[xdit]' in db-SP's repository"


@pytest.mark.parametrize(
    ("found", "seen", "said"),
    [
        (None, ("dbsp",), None),
        ("0.5.23", ("dbsp",), ("ok", "0.5.23, sees db-SP")),
        ("0.5.23.post1", ("dbsp",), ("ok", "0.5.23.post1, sees db-SP")),
        ("0.6.0", ("dbsp",), ("missing", "0.6.0 is not known to db-SP")),
        ("0.5.23", ("another",), ("missing", "0.5.23, which does not see db-SP")),
    ],
)
def test_it_says_of_each_engine_that_is_installed_whether_it_sees_dbsp(monkeypatch, found, seen, said):
    monkeypatch.setattr(doctor, "installed_version", lambda package: found)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint(name, "", group) for name in seen])
    check = next(engine for engine in doctor.ENGINES if engine.package == "sglang").check()
    assert (check and (check.state, check.detail)) == said
    assert check is None or bool(check.fix) != check.ok


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_on_a_gpu_doctor_names_the_kernel_that_auto_takes(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    for name in ("fa4", "triton"):
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], why_unavailable=lambda: None))
    check = next(check for check in doctor._kernels() if check.what == "kernel auto")
    assert check.ok
    assert check.detail == "triton, the first that supports torch.bfloat16 on cuda"


def test_on_a_gpu_without_triton_doctor_names_the_command(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    check = next(check for check in doctor._kernels() if check.what == "kernel auto")
    assert not check.ok
    assert "run `pip install triton`" in check.detail


def test_version(dbsp):
    code, out, _ = dbsp("--version")
    assert (code, out) == (0, f"db-SP {doctor.own_version()}\n")


def extras() -> dict[str, set[str]]:
    """Packages that each extra names, itself or through another of ours, as they are imported."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found = set()
        for requirement in named[extra]:
            ours = re.fullmatch(rf"{project['name']}\[(\w+)\]", requirement)
            found |= packages(ours[1]) if ours else {re.match(r"[\w-]+", requirement)[0].replace("-", "_")}
        return found

    return {extra: packages(extra) for extra in named}


@pytest.mark.parametrize("needs", [*HOSTS, *doctor._PACKAGES, *hosts.HOSTS.values()], ids=str)
def test_an_extra_alone_brings_what_it_is_named_for(needs):
    assert set(needs.needs) <= extras()[needs.extra]
