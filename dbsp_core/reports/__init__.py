"""Reports of runs, collected by observers during the run and gathered from all ranks afterwards."""
