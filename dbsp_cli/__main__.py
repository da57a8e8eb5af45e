"""`python -m dbsp_cli`: the `dbsp` command, where its script is not on the path."""

from dbsp_cli.entry import dbsp

dbsp()
