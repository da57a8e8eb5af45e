"""`dbsp doctor`: what it calls ok has been imported; and the extras install what their frameworks need."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from packaging.requirements import Requirement

from dbsp_cli.commands import doctor
from dbsp_cli.commands.doctor import FRAMEWORKS, Importable
from dbsp_core.utils import expected_host
from dbsp_kernels import KERNELS
from dbsp_kernels.errors import install_command
from tests.support.repository import ROOT

MISSING = Importable("xDiT", ("dbsp_no_such_module",), "xdit")
PRESENT = Importable("diffusers", ("yaml",), "diffusers")


@pytest.mark.parametrize(
    ("frameworks", "packages"),
    [pytest.param(FRAMEWORKS, doctor._PACKAGES, marks=pytest.mark.long), ((PRESENT, MISSING), ())],
    ids=["all", "stubs"],
)
def test_findings_that_are_not_ok_have_a_fix_and_the_last_line_is_the_verdict(dbsp, monkeypatch, frameworks, packages):
    monkeypatch.setattr(doctor, "FRAMEWORKS", frameworks)
    monkeypatch.setattr(doctor, "_PACKAGES", packages)
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


def test_what_is_installed_and_cannot_be_imported_is_not_ok(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import dbsp_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = Importable("broken", ("broken_package",), "xdit").check()
    said = "cannot be imported: ModuleNotFoundError: No module named 'dbsp_no_such_module'"
    assert (check.state, check.detail, check.fix) == ("missing", said, install_command("xdit"))


@pytest.mark.parametrize(
    ("version", "plug_in", "said"),
    [
        (None, "dbsp", None),
        ("0.5.23.post1", "dbsp", ("ok", "0.5.23.post1, sees db-SP")),
        ("0.6.0", "dbsp", ("missing", "db-SP expects SGLang 0.5.23, and this is 0.6.0")),
        ("0.5.23", "another", ("missing", "0.5.23, which does not see db-SP")),
    ],
)
def test_it_says_of_each_engine_that_is_installed_whether_it_sees_dbsp(monkeypatch, version, plug_in, said):
    for module in (doctor, expected_host):
        monkeypatch.setattr(module, "installed_version", lambda package: version)
    monkeypatch.setattr(expected_host, "is_defined", lambda name: True)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint(plug_in, "", group)])
    monkeypatch.setattr(doctor, "FRAMEWORKS", ())
    monkeypatch.setattr(doctor, "_PACKAGES", ())
    checks = [check for check in doctor.run_checks() if check.what == "SGLang Diffusion"]
    assert [(check.state, check.detail) for check in checks] == ([said] if said else [])
    assert all(bool(check.fix) != check.ok for check in checks)


def kernels() -> dict[str, doctor.Check]:
    return {check.what: check for check in doctor._kernels()}


def test_on_a_gpu_it_names_the_kernel_that_auto_takes_or_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    with monkeypatch.context() as patched:
        patched.setitem(KERNELS, "triton", replace(KERNELS["triton"], why_unavailable=lambda: None))
        assert kernels()["kernel auto"].ok
        assert kernels()["kernel auto"].detail == "triton, the first that supports torch.bfloat16 on cuda"
    monkeypatch.setattr("dbsp_kernels.triton.launch.triton_version", lambda: (3, 3))
    fix = "install torch 2.9 or newer, which brings a newer Triton"
    assert kernels()["kernel triton"] == doctor.Check("kernel triton", "missing", "Triton 3.3 is older than 3.5", fix)
    assert fix in kernels()["kernel auto"].detail
    assert not kernels()["kernel auto"].ok


def test_it_says_which_kernel_auto_takes_and_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], why_unavailable=lambda: "no operator here"))
    assert kernels()["kernel cpu"].detail == "no operator here"
    assert kernels()["kernel auto"].detail == "reference, the first that supports torch.float32 on cpu"
    monkeypatch.setenv("DBSP_KERNEL", "reference")
    assert kernels()["kernel auto"].detail == "reference, because DBSP_KERNEL=reference"


def packages_of(extra: str) -> set[str]:
    """Returns the packages that an extra names, itself or through another of ours, as they are imported."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [Requirement(text) for text in project["optional-dependencies"][extra]]
    through = {one for need in required if need.name == project["name"] for one in need.extras}
    return {need.name.replace("-", "_") for need in required}.union(*map(packages_of, through))


def test_an_extra_alone_brings_what_it_is_named_for():
    for needs in (*FRAMEWORKS, *doctor._PACKAGES):
        assert set(needs.needs) <= packages_of(needs.extra), needs


@pytest.mark.parametrize(
    ("address", "interface", "state"),
    [("10.0.0.7", "", "ok"), ("127.0.1.1", "", "not here"), (None, "", "not here"), (None, "eth0", "ok")],
)
def test_an_address_that_leads_to_no_other_node_is_reported(monkeypatch, address, interface, state):
    def resolve(*_: object, **__: object) -> list[tuple]:
        if address is None:
            raise OSError("unknown name")
        return [(None, None, None, "", (address, 0))]

    monkeypatch.setenv(doctor.GLOO, interface)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    check = doctor._between_nodes()
    assert check.state == state
    assert check.ok or ("SOCKET_IFNAME on each" in check.fix and "such as eth0" in check.fix)
