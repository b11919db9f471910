"""The processes of the agent: wiring, loops, command line.

What lives here: whatever starts threads, tasks or processes and ties hands to decisions. What must never enter: a
decision (`core`), a parser of outside text (`intake`), knowledge of one outside thing (`adapters`).
Start reading at the module that is named after the process you look for.
"""

from __future__ import annotations
