"""Pure planning functions: counts in, owners and slots out. numpy alone: no torch, no process group."""
