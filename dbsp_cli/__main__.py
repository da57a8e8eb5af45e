"""`python -m dbsp_cli`, and the program of ranks, run as a file so that nothing in the current folder is imported."""

import sys
from pathlib import Path

if not __package__:  # run as a file: Python would search its folder first
    package_folder = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if folder != str(package_folder)]
    if str(package_folder.parent) not in sys.path:
        sys.path.append(str(package_folder.parent))

from dbsp_cli.entry import dbsp

dbsp()
