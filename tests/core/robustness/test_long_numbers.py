"""Numbers in text that are longer than any that is meant: Python reads at most 4,300 digits, and a range must end."""

from __future__ import annotations

import pytest

from dbsp_cli.commands.masks import parse_thw
from dbsp_core import Strategy
from dbsp_core.masks.step_groups import StepGroups
from dbsp_core.masks.token_order import require_order
from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.streams import parse_streams
from dbsp_core.reports.mask_recorder import parse_layers
from dbsp_core.utils.byte_sizes import parse_size
from dbsp_core.utils.errors import UserError

LONG = "9" * 5000


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (Strategy.parse, f"U{LONG}R2"),
        (lambda text: BagTopology.parse(text, 8), f"g{LONG}n4"),
        (parse_streams, f"g{LONG}b1i256"),
        (StepGroups.parse, f"5-{LONG}"),
        (require_order, f"tile:{LONG}x1x1"),
        (parse_layers, f"0,{LONG}"),
        (parse_layers, "0-999999999"),
        (parse_thw, f"{LONG},45,80"),
        (parse_size, f"{LONG}GiB"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_it_is_refused_in_one_line(read, text):
    with pytest.raises(UserError) as refused:
        read(text)
    assert "\n" not in str(refused.value)
