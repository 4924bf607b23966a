"""Audits a run by its files: `python -m rl.audit WORKDIR`. rl/trust/audit.py has the rules and the parser."""

import sys

from rl.trust import audit

if __name__ == "__main__":
    sys.exit(audit.main())
