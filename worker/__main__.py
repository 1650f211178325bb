"""`python -m headrace.worker`: the same as `headrace worker`, for a parent process that starts one."""

import sys

from headrace.shared.cli import main

main(["worker", *sys.argv[1:]], prog_name="headrace")
