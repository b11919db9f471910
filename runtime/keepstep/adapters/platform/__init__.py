"""What the platform gives a container, read without changing anything: its kernel, limits, folders, rights, neighbours.

What lives here: readings, each a function that returns what JSON can hold, and the file that they are written to. What
must never enter: a judgement of what was found, and the value of any environment variable.
Start reading at `machine`, then `rights`; `neighbours` needs other hosts.
"""
