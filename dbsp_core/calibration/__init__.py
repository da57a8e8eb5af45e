"""Measuring this machine for the latency model: `dbsp calibrate`."""

from dbsp_core.calibration.run import Calibration, Checked, calibrate, check

__all__ = ["Calibration", "Checked", "calibrate", "check"]
