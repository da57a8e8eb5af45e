"""Pages and pictures: tables, commands and messages on them are those of the code, and they can be built again."""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import shlex
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import yaml

import dbsp_core
import dbsp_diffusers
import dbsp_para
import dbsp_xdit
from dbsp_core import SequenceLayout, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.sources import SOURCES, MaskRequest, WindowSource
from dbsp_xdit.command_line import add_flags, config_from, source_of
from scripts.docs_site import settings_tables
from scripts.reproduce.lockstep import rho_before
from tests.docs.results import table
from tests.support.programs import run
from tests.support.repository import ROOT
from tests.support.texts import nodes_of
from tests.test_layering import PACKAGES, files

MASKS_PAGE = (ROOT / "docs" / "masks.md").read_text()
WAN = MaskRequest(layer=0, heads=40, thw=(21, 45, 80))
PATTERNS, PREDICTED = (
    table("docs/masks.md", f"| source | keys and defaults | a query {attends} to |")
    for attends in ("attends", "block attends")
)
MEASURED = {row[0]: row[-3:] for row in PATTERNS if row[-1]}
DEFAULTS = {f"`{name}`": SOURCES[name] for name in SOURCES} | {
    "`window` with `tile`": lambda: WindowSource(120, 120, tile=(3, 5, 8))
}


@pytest.mark.parametrize("row", MEASURED)
def test_the_table_of_sources(row):
    density, ulysses, ring = (float(value) for value in MEASURED[row])
    source = DEFAULTS[row]()
    mask = source.mask(WAN)
    assert round(mask.density, 3) == density
    for name, rho in (("U8R1", ulysses), ("U1R8", ring)):
        strategy = Strategy.parse(name)
        layout = SequenceLayout.striped(source.grid(WAN), strategy)
        plan = make_plan(mask, strategy, layout=layout)
        assert round(rho_before(mask, strategy), 3) == rho, "of a ring in lockstep"
        assert plan.rho < 1.0105, "brought to 1.01 or less"


def test_the_tables_name_every_source():
    assert {row[0].split("`")[1] for row in (*PATTERNS, *PREDICTED)} == set(SOURCES)


def test_the_function_to_write_oneself(tmp_path, monkeypatch):
    text = MASKS_PAGE[MASKS_PAGE.index("## Write your own") :]
    code, settings = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL).group(1) for kind in ("python", "yaml"))
    (tmp_path / "my_patterns.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_patterns", raising=False)
    source = DbspConfig.load(yaml.safe_load(settings)).mask
    mask = source.mask(WAN)
    bits = mask.bits[0].numpy()
    assert np.diagonal(bits).all()
    assert 0.1 < mask.density < 0.9
    frame = mask.grid.q_axis.starts // (45 * 80)
    assert bits[0, frame <= 2].all()
    assert not bits[0, np.isin(frame, (5, 6, 7))].any()


XDIT_PAGE = (ROOT / "docs" / "xdit.md").read_text()
COMMANDS = re.findall(r"^xdit (?:.*\\\n)*.*", XDIT_PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_of_xdit_are_right(tmp_path, monkeypatch, command):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    parser = add_flags(argparse.ArgumentParser())
    for name in ("--model", "--prompt", "--output_directory"):
        parser.add_argument(name, required=True)
    for name in ("--ulysses_degree", "--ring_degree", "--height", "--width", "--num_frames", "--num_inference_steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--input_images", nargs="+")
    parser.add_argument("--use_cfg_parallel", action="store_true")
    words = shlex.split(command.replace("\\\n", " "))[1:]
    args = vars(parser.parse_args([word.replace("--sp-", "--sp_") for word in words]))
    assert config_from(args) is not None
    source_of(args["model"])


TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = ("unrecognized arguments", "import xfuser", "terminate called", "Failed to load the backend")
"""Quoted, but said by others."""


def strings() -> Iterator[str]:
    """Yields every string of the packages; f-strings with … for their values."""
    for node in itertools.chain.from_iterable(map(nodes_of, files(*PACKAGES))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted() -> list[str]:
    """Returns messages in bold code on the page, line breaks closed up."""
    spans = re.findall(r"\*\*`([^`]+)`", TROUBLESHOOTING)
    return [span for span in (" ".join(span.split()) for span in spans) if not any(o in span for o in OTHERS)]


def test_the_page_quotes_messages_that_the_code_has():
    """On the page, … is for anything."""
    messages, texts = quoted(), "\0".join(strings())
    assert len(messages) > 20
    patterns = {one: "[^\0]+?".join(re.escape(piece.strip()) for piece in one.split("…")) for one in messages}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, texts)] == []


@pytest.mark.long
def test_the_site_builds_strictly(tmp_path):
    strict = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "scripts/docs_site"]
    done = run([sys.executable, "-m", "sphinx", *strict, "docs", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "README.html").exists()
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for package in (dbsp_core, dbsp_diffusers, dbsp_para, dbsp_xdit):
        for name in package.__all__:
            assert f'id="{package.__name__}.{name}"' in api or f'id="dbsp_diffusers.{name}"' in api, name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {f"{name}.md" for name in re.findall(r"\]\(([\w/-]+)\.md\)", index)}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages - {"README.md"}


def test_tables_of_settings_say_what_their_classes_say():
    text = settings_tables.PAGE.read_text(encoding="utf-8")
    assert text == settings_tables.with_tables(text), "run scripts/docs tables"
    assert text.count("<!-- table ") == text.count("<!-- end -->") == len(settings_tables.SECTIONS) + 1
