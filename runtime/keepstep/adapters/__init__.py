"""Hands: one module or package per thing outside of the agent.

What lives here: translations between a port's words and an outside thing's (etcd, processes, NVML, Prometheus, the
clock, ...). What must never enter: a decision, and any import of one adapter by another, the clock apart.
Start reading at `keepstep.ports`, which says what each hand promises.
"""
