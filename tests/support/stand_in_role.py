"""Stands in for a process of a run: `python -m tests.support.stand_in_role NAME FILE`.

It appends its name and its parent's process ID to the file. The learner ends well once a worker has started twice, and "broken" ends with
an error; others stay.
"""

import os
import sys
import threading
import time

from sharding.system import cli

if __name__ == "__main__":
    name, file = sys.argv[1:3]
    if name == "broken":
        sys.exit("error: it is broken")
    with open(file, "a") as log:
        log.write(f"{name} {os.getppid()}\n")
    cli.stop_at_eof(lambda: os._exit(1))
    while name != "learner":
        threading.Event().wait()
    while open(file).read().count("worker") < 2:
        time.sleep(0.1)
