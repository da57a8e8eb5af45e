"""Tables: whole words and numbers at any width, and nothing in them taken for markup."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from dbsp_cli import output
from dbsp_cli.output import TextTable, as_text

NAMES = ("strategy", "planner", "exchange", "exposed", "end to end")
ROWS = [("U8R1", "contiguous", "123456.7", "+323.5%", "1.0"), ("U4R2", "[red]dbsp[/b]", "1.2", "+0.1%", "98765.4")]
TABLE = TextTable("a title", NAMES, ROWS, "a caption", left=NAMES[:2], spare=("exposed", "exchange"))


def test_all_of_it_where_there_is_room():
    assert as_text(TABLE).splitlines() == [
        "a title",
        "strategy  planner        exchange  exposed  end to end",
        "--------  -------------  --------  -------  ----------",
        "U8R1      contiguous     123456.7  +323.5%         1.0",
        "U4R2      [red]dbsp[/b]       1.2    +0.1%     98765.4",
        "a caption",
    ]


def test_columns_to_spare_go_first_and_are_named():
    lines = as_text(TABLE, 45).splitlines()
    assert lines[1].split() == ["strategy", "planner", "exchange", "end", "to", "end"]
    assert lines[-2] == "(a wider terminal shows exposed as well)"
    assert "exchange" not in as_text(TABLE, 36).splitlines()[1]


@pytest.mark.parametrize("width", [30, 36, 45, 60, 200])
def test_nothing_is_cut_and_nothing_is_wider(width):
    table = TextTable("", ("what", "why"), [("数字", "a/long/path/without/any/space"), ("b", "some words that wrap")])
    for one in (table, TABLE):
        lines = as_text(one, width).splitlines()
        grid = [line for line in lines if line not in (one.title, one.caption) and not line.startswith("(")]
        assert max(map(cell_len, grid)) <= width
        shown = "".join("".join(grid).split())
        kept = [name for name in one.columns if name not in one.spare]
        for row in one.rows:
            cells = dict(zip(one.columns, row, strict=True))
            assert all("".join(cells[name].split())[:8] in shown for name in kept), shown
    words = "".join(as_text(TextTable("", ("a", "b"), [("x", "one two three four five")], left="b"), 12).split())
    assert words.endswith("x" + "one" + "two" + "three" + "four" + "five")


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_narrow(monkeypatch, capsys, terminal):
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: terminal)
    output.print_tables([TABLE])
    assert ("exposed" in capsys.readouterr().out.splitlines()[1]) is not terminal
