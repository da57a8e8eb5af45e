"""scripts/versions: private names of the installed frameworks, and messages where versions differ."""

from __future__ import annotations

import json

import pytest

from scripts.checks.csv_table import update_table
from scripts.checks.versions.looking_up import PrivateName, belongs, message
from scripts.checks.versions.private_names import PRIVATE_NAMES
from scripts.checks.versions.rows import Row, summed_up
from tests.support.programs import run_module
from tests.support.repository import ROOT


def test_what_is_installed_has_every_private_name():
    """When this fails, a framework has changed: look at the modules of ours that it names in private_names.py."""
    done = run_module("scripts.checks.versions.probe", "--names")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["names"]
    assert {package: one["messages"] for package, one in found.items()} == {package: [] for package in PRIVATE_NAMES}
    assert all(one["of"] == len(PRIVATE_NAMES[package]) > 0 for package, one in found.items())


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


def test_a_newer_name_is_not_asked_of_an_older_version():
    asked = [belongs(PrivateName("torch:no", "x", since=since), "torch") for since in ("", "2.0", "99.0")]
    assert asked == [True, True, False]


def test_every_private_name_names_a_module_of_ours():
    for names in PRIVATE_NAMES.values():
        for one in names:
            path = one.user.replace(".", "/") + ".py"
            assert (ROOT / path).is_file() or (ROOT / "kernels" / path).is_file(), one


def test_what_many_names_lack_for_one_reason_is_said_once():
    messages = [f"diffusers:{name}: cannot be imported" for name in "abc"]
    messages += ["diffusers:d takes no x", "torch:e takes no x"]
    found = {
        "names": {"diffusers": {"of": 6, "messages": messages}},
        "runs": {},
        "versions": {"python": "", "torch": ""},
    }
    row = summed_up(Row("diffusers", "0.1", "oldest"), found)
    assert row.names == "1 of 6"
    assert row.messages == ("diffusers:a and 2 others: cannot be imported; diffusers:d takes no x; torch:e takes no x")


def test_a_table_keeps_rows_of_what_was_not_tried_again(tmp_path):
    table = tmp_path / "table.csv"
    update_table(table, [{"name": name, "of": 1, "found": 3} for name in ("b", "a")], ("name", "of"))
    update_table(table, [{"name": "b", "of": 1, "found": 4}], ("name", "of"))
    assert table.read_text().splitlines() == ["name,of,found", "b,1,4", "a,1,3"]
    update_table(table, [{"name": "c", "of": 2, "found": 5}], ("name", "of"), order=[("a", "1"), ("c", "2")])
    assert table.read_text().splitlines() == ["name,of,found", "a,1,3", "c,2,5"]
