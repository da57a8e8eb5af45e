"""Help of all scripts; seeded faults and private names of frameworks."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from scripts.checks.private_names import PrivateName, message, private_names
from scripts.checks.seeded_faults import REPO, copied, faults, tried
from tests.support.programs import output_of
from tests.support.repository import ROOT


@pytest.mark.parametrize("concept", faults())
def test_fault_changes_one_line_and_its_tests_exist(concept):
    fault = faults()[concept]
    assert (REPO / fault.file).read_text(encoding="utf-8").count(fault.was) == 1
    assert fault.was != fault.becomes
    assert (REPO / fault.tests.split()[0]).exists()


@pytest.mark.long
def test_a_fault_is_caught_and_no_fault_is_missed(tmp_path):
    copy, fault = copied(tmp_path / "copy"), next(iter(faults().values()))
    assert tried(fault._replace(becomes=fault.was), copy, 0) == "missed"
    assert tried(fault, copy, 1) == "caught"
    assert (copy / fault.file).read_text(encoding="utf-8") == (REPO / fault.file).read_text(encoding="utf-8")


def test_what_is_installed_has_every_private_name():
    """Fails when a framework has changed: then look at the modules of ours that private_names.yaml names."""
    found = json.loads(output_of("scripts.checks.private_names").splitlines()[-1])
    assert found["messages"] == []
    assert found["of"] == Counter(name.package for name in private_names() if name.belongs)
    assert set(found["of"]) == {"xfuser", "diffusers", "para-attn", "cache-dit", "torch"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (PrivateName("json:JSONDecoder.__init__", "x", ("self", "strict"), ("self.strict =",)), None),
        (PrivateName("json.tool", "x"), None),
        (PrivateName("no_such_package:f", "x"), "No module named"),
        (PrivateName("json:JSONDecoder.gone", "x"), "has no attribute 'gone'"),
        (PrivateName("json:JSONDecoder.__init__", "x", ("self", "gone")), "takes no gone"),
        (PrivateName("json:JSONDecoder.__init__", "x", says=("self.gone =",)), "does not have self.gone ="),
    ],
)
def test_what_a_version_lacks_is_said(name, said):
    found = message(name)
    assert found is None if said is None else said in found


def test_every_private_name_names_a_module_of_ours():
    for one in private_names():
        path = one.user.replace(".", "/") + ".py"
        assert (ROOT / path).is_file() or (ROOT / "kernels" / path).is_file(), one


PARTS = {
    *("scripts.checks.gpu.compilation", "scripts.checks.private_names"),
    *("scripts.checks.engines.sglang_stubs", "scripts.checks.engines.vllm_omni_command"),
}
"""Processes that other programs start."""


def programs() -> list[str]:
    files = [path for path in (ROOT / "scripts").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files)


@pytest.mark.long
@pytest.mark.parametrize("module", sorted(set(programs()) - PARTS))
def test_help_is_all_that_happens(module):
    assert output_of(module, "--help", timeout=60).lstrip().lower().startswith("usage:")
