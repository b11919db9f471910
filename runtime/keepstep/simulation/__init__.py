"""Many nodes in a lying world, in virtual time, from one seed: the very `decide` of production, its hands and sensors faked.

What must never enter: wall clocks, threads, files, anything that would make a seed play differently twice. Start reading at
`run.py` (what one seed does), then `host.py` (a host: init, agent, worker), `fakes.py` (coordinator, store), `checkers.py`.
"""
