"""Many nodes in a lying world, in virtual time, from one seed: the `decide` of production, its hands and sensors faked.

What lives here: a host (init, agent, worker), a coordinator, a store, kinds of fault, and what must hold all along.
What must never enter: wall clocks, threads, files, anything that would make a seed play differently twice.
Start reading at `run` (what one seed does), then `host`, `worker`, `fakes`, `faults` and `checkers`.
"""
