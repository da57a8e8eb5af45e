"""Lines for the user: on standard error with a prefix, or wherever the application sends them."""

from __future__ import annotations

import pytest

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import exit_on_user_error, log, printable


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
