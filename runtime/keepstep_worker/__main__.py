"""`python -m keepstep_worker SCRIPT ARGS...`: runs a script with the agent listening."""

from keepstep_worker.bootstrap import main

main()
