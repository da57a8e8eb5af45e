"""`dbsp doctor`: what it calls ok has been imported; and the extras install what their frameworks need."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest
import torch

from dbsp_cli.commands import doctor
from dbsp_cli.commands.doctor import FRAMEWORKS, Importable
from dbsp_core.utils import expected_host
from dbsp_kernels import KERNELS
from dbsp_kernels.errors import install_command
from tests.support.programs import children_forked
from tests.support.repository import ROOT

MISSING = Importable("nothing", ("dbsp_no_such_module",), "xdit")


@pytest.mark.parametrize(
    "frameworks",
    [
        pytest.param(FRAMEWORKS, marks=pytest.mark.long),
        # what programs that are forked find imported, and what is not there
        (next(one for one in FRAMEWORKS if one.what == "diffusers"), replace(MISSING, what="xDiT")),
    ],
    ids=["all", "one that is there"],
)
def test_findings_that_are_not_ok_have_a_fix_and_the_last_line_is_the_verdict(dbsp, monkeypatch, frameworks):
    monkeypatch.setattr(doctor, "FRAMEWORKS", frameworks)
    with children_forked():
        code, out, err = dbsp("doctor", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    findings = {finding.pop("what"): finding for finding in said["findings"]}
    assert {"db-SP", "python", "torch", "accelerator", "communication", "kernel cpu", "xDiT"} <= set(findings)
    assert all(list(finding) == ["state", "detail", "fix", "ok"] for finding in findings.values())
    assert all(bool(finding["fix"]) != finding["ok"] for finding in findings.values())
    assert said["verdict"].startswith(f"db-SP {findings['db-SP']['detail']} ")
    for framework in frameworks:
        assert (framework.what in said["verdict"]) is findings[framework.what]["ok"]
    if not torch.cuda.is_available():
        assert findings["kernel triton"]["state"] == findings["accelerator"]["state"] == "not here"
        assert findings["kernel triton"]["detail"] == "needs a GPU"


def test_the_table_says_the_same_with_its_brackets(dbsp, monkeypatch):
    monkeypatch.setattr(doctor, "FRAMEWORKS", ())
    monkeypatch.setattr(doctor, "_PACKAGES", (MISSING,))
    monkeypatch.setattr(doctor, "verdict", lambda checks: "a verdict")
    code, out, _ = dbsp("doctor")
    assert (code, out.splitlines()[0]) == (0, "a verdict")
    assert "missing   nothing" in out
    assert f"lacks dbsp_no_such_module; {install_command('xdit')}\n" in out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import dbsp_no_such_module\n", "ModuleNotFoundError: No module named 'dbsp_no_such_module'"),
        ("import os, sys\nos.write(2, b'\\xff\\n')\nsys.exit(1)\n", "\ufffd"),  # which is not text
    ],
)
def test_what_is_installed_and_cannot_be_imported_is_not_ok(tmp_path, monkeypatch, source, said):
    (tmp_path / "broken_package.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = Importable("broken", ("broken_package",), "xdit").check()
    assert (check.state, check.detail) == ("missing", f"cannot be imported: {said}")
    assert check.fix == install_command("xdit")


@pytest.mark.parametrize(
    ("installed", "command"),
    [(True, "pip install 'dbsp-attention[xdit]'"), (False, "pip install '.[xdit]' in db-SP's repository")],
)
def test_an_extra_is_installed_for_the_package_that_is_there(monkeypatch, installed, command):
    def found(name: str) -> object:
        if not installed:
            raise PackageNotFoundError(name)
        return object()

    monkeypatch.setattr("dbsp_kernels.errors.distribution", found)
    assert install_command("xdit") == command


@pytest.mark.parametrize(
    ("found", "seen", "said"),
    [
        (None, ("dbsp",), None),
        ("0.5.23", ("dbsp",), ("ok", "0.5.23, sees db-SP")),
        ("0.5.23.post1", ("dbsp",), ("ok", "0.5.23.post1, sees db-SP")),
        ("0.6.0", ("dbsp",), ("missing", "db-SP expects SGLang 0.5.23, and this is 0.6.0")),
        ("0.5.23", ("another",), ("missing", "0.5.23, which does not see db-SP")),
    ],
)
def test_it_says_of_each_engine_that_is_installed_whether_it_sees_dbsp(monkeypatch, found, seen, said):
    for module in (doctor, expected_host):
        monkeypatch.setattr(module, "installed_version", lambda package: found)
    monkeypatch.setattr(expected_host, "is_defined", lambda name: True)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint(name, "", group) for name in seen])
    monkeypatch.setattr(doctor, "ENGINES", [engine for engine in doctor.ENGINES if engine[0] == "SGLang Diffusion"])
    checks = doctor._engines()
    assert [(check.state, check.detail) for check in checks] == ([said] if said else [])
    assert all(bool(check.fix) != check.ok for check in checks)


@pytest.fixture
def gpu(monkeypatch):
    """Makes a GPU seem to be there, for which fa4 and Triton are installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv("DBSP_KERNEL", raising=False)


def kernel_auto() -> doctor.Check:
    return next(check for check in doctor._kernels() if check.what == "kernel auto")


def test_on_a_gpu_doctor_names_the_kernel_that_auto_takes(gpu, monkeypatch):
    for name in ("fa4", "triton"):
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], why_unavailable=lambda: None))
    assert kernel_auto().ok
    assert kernel_auto().detail == "triton, the first that supports torch.bfloat16 on cuda"


def test_on_a_gpu_without_triton_doctor_names_the_command(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not kernel_auto().ok
    assert "run `pip install triton`" in kernel_auto().detail


def test_on_a_gpu_with_an_old_triton_doctor_names_the_torch(gpu, monkeypatch):
    monkeypatch.setattr("dbsp_kernels.triton.launch.triton_version", lambda: (3, 3))
    found = {check.what: check for check in doctor._kernels()}
    fix = "install torch 2.9 or newer, which brings a newer Triton"
    assert found["kernel triton"] == doctor.Check("kernel triton", "missing", "Triton 3.3 is older than 3.5", fix)
    assert fix in found["kernel auto"].detail


def test_doctor_says_which_kernel_auto_takes_and_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], why_unavailable=lambda: "no operator here"))
    found = {check.what: check.detail for check in doctor._kernels()}
    assert found["kernel cpu"] == "no operator here"
    assert found["kernel auto"] == "reference, the first that supports torch.float32 on cpu"
    monkeypatch.setenv("DBSP_KERNEL", "reference")
    found = {check.what: check.detail for check in doctor._kernels()}
    assert found["kernel auto"] == "reference, because DBSP_KERNEL=reference"


def test_version(dbsp):
    code, out, _ = dbsp("--version")
    assert (code, out) == (0, f"db-SP {doctor.own_version()}\n")


def extras() -> dict[str, set[str]]:
    """Returns packages that each extra names, itself or through another of ours, as they are imported."""
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


@pytest.mark.parametrize("needs", [*FRAMEWORKS, *doctor._PACKAGES], ids=str)
def test_an_extra_alone_brings_what_it_is_named_for(needs):
    assert set(needs.needs) <= extras()[needs.extra]


@pytest.fixture
def node(monkeypatch):
    """Makes node(…) set the address of a machine's host name, or none, and the variables; returns the checks."""

    def make(address: str | None = "10.0.0.7", **variables: str) -> list[tuple[str, str]]:
        def resolve(*_: object, **__: object) -> list[tuple]:
            if address is None:
                raise OSError("unknown name")
            return [(None, None, None, "", (address, 0))]

        for name in (doctor.GLOO, doctor.NCCL):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("socket.gethostname", lambda: "node7")
        monkeypatch.setattr("socket.getaddrinfo", resolve)
        monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(("lo", "docker0", "eth0", "ib0"))))
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
        checks = doctor._between_nodes()
        for check in checks:
            assert check.ok or ("SOCKET_IFNAME on each" in check.fix and "such as eth0" in check.fix)
        return [(check.state, check.detail) for check in checks]

    return make


def test_gloo_listens_at_the_address_of_the_host_name(node):
    assert node() == [("ok", "gloo listens at 10.0.0.7, the address of node7")]
    for address in ("127.0.0.1", "127.0.1.1", "::1", None):
        ((state, detail),) = node(address)
        assert (state, detail.endswith("so gloo listens on loopback")) == ("not here", True)


@pytest.mark.parametrize(
    ("value", "gloo", "nccl"),
    [
        ("eth0", "ok", "ok"),
        ("eth9", "missing", "missing"),
        ("lo", "not here", "not here"),
        ("eth0,eth9", "missing", "missing"),
        ("eth", "missing", "ok"),  # a prefix for NCCL
        ("=eth0", "ok", "ok"),
        ("=eth", "missing", "missing"),
    ],
)
def test_variable_that_names_no_interface_to_other_nodes_is_reported(node, value, gloo, nccl):
    assert [state for state, _ in node(GLOO_SOCKET_IFNAME=value, NCCL_SOCKET_IFNAME=value)] == [gloo, nccl]
