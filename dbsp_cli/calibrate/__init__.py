"""Measuring this machine for the latency model: `dbsp calibrate`."""
