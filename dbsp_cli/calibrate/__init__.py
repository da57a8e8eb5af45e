"""Measuring this machine for the latency model: `dbsp calibrate`."""

from dbsp_cli.calibrate.calibrate import Calibration, Checked, calibrate, check

__all__ = ["Calibration", "Checked", "calibrate", "check"]
