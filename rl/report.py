"""Draws the report of a run: `python -m rl.report WORKDIR...`. rl/experiment/report.py has the pages and the parser."""

import sys

from rl.experiment import report

if __name__ == "__main__":
    sys.exit(report.main())
