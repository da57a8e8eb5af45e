"""Lines for the user, and text from users that Python cannot read: over 4,300 digits, dates, ranges that never end."""

from __future__ import annotations

import pytest

from dbsp_cli.mask_tools.convert import parse_thw
from dbsp_core import Strategy
from dbsp_core.masks.grid import require_order
from dbsp_core.masks.steps import StepGroups
from dbsp_core.planning.bags import BagTopology
from dbsp_core.reports.mask_recorder import parse_layers
from dbsp_core.sources.spec import mask_settings
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import parse_size
from dbsp_core.utils.process import exit_on_user_error, log, printable
from dbsp_core.utils.yaml_file import parse_value, read_settings


def test_lines_go_to_standard_error_once(capsys):
    log.info("mask %s", "radial 50 %")
    log.warning("no report")
    with pytest.raises(SystemExit) as stopped, exit_on_user_error():
        raise UserError("100 % of it")
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "dbsp: mask radial 50 %\ndbsp: no report\ndbsp: error: 100 % of it\n")


def test_control_characters_of_files_and_names_do_not_reach_the_terminal(capsys):
    log.warning("no report in %s", "\x1b]0;title\x07\x9b31m\u202emp4\ttail")
    assert capsys.readouterr().err == "dbsp: no report in \\x1b]0;title\\x07\\x9b31m\\u202emp4\\ttail\n"
    assert printable("ρ_s × 2\n– 1.0") == "ρ_s × 2\n– 1.0"


LONG = "9" * 5000
NESTED = "[" * 2000


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (Strategy.parse, f"U{LONG}R2"),
        (lambda text: BagTopology.parse(text, 8), f"g{LONG}n4"),
        (StepGroups.parse, f"5-{LONG}"),
        (require_order, f"tile:{LONG}x1x1"),
        (parse_layers, f"0,{LONG}"),
        (parse_layers, "0-999999999"),
        (parse_thw, f"{LONG},45,80"),
        (parse_thw, "\x1c1,45,80"),  # a space to a pattern of Unicode, none to int()
        (parse_size, f"{LONG}GiB"),
        (mask_settings, f"sparge:cdf={LONG}"),
        (lambda text: parse_value(text, "--set a"), NESTED),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_unreadable_text_is_rejected(read, text):
    with pytest.raises(UserError):
        read(text)


@pytest.mark.parametrize(
    "value",
    [LONG, NESTED, "2026-99-99", "!!float '-'"],
    ids=lambda value: value[:12],
)
def test_file_with_an_unreadable_value_is_rejected_in_one_line(tmp_path, value):
    file = tmp_path / "my.yaml"
    file.write_text(f"debug: {value}\n")
    with pytest.raises(UserError, match=r"^configuration file .*my\.yaml is not YAML: [^\n]*$"):
        read_settings(file, "configuration file")
