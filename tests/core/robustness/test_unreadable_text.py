"""Numbers and dates in text that Python cannot read, such as over 4,300 digits, and ranges that never end."""

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
from dbsp_core.utils.yaml_file import parse_value, read_settings

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
        (mask_settings, "sparge:cdf=!!bool maybe"),
        (lambda text: parse_value(text, "--set a"), NESTED),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_unreadable_text_is_rejected(read, text):
    with pytest.raises(UserError):
        read(text)


@pytest.mark.parametrize(
    "value",
    [LONG, NESTED, "2026-99-99", "!!bool maybe", "!!int ''", "!!float '-'", "!!timestamp noon", "1:" * 300 + "1.5"],
    ids=lambda value: value[:12],
)
def test_file_with_an_unreadable_value_is_rejected_in_one_line(tmp_path, value):
    file = tmp_path / "my.yaml"
    file.write_text(f"debug: {value}\n")
    with pytest.raises(UserError, match=r"^configuration file .*my\.yaml is not YAML: [^\n]*$"):
        read_settings(file, "configuration file")
