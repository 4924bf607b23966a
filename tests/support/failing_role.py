"""Stands in for a process of a run that ends with an error: `python -m tests.support.failing_role URL`; with "wait" as its URL, it stays."""

import sys
import time

if __name__ == "__main__":
    if sys.argv[1] == "wait":
        time.sleep(1e6)
    sys.exit(f"error: {sys.argv[1]!r} is not a URL; correct it")
