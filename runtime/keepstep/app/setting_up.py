"""What is read, and got, before the loop begins."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from keepstep import kernel
from keepstep.adapters.init_link import InitState
from keepstep.app.launch_checks import SMDDPRUN, check_launcher, has_program
from keepstep.app.options import TrainOptions
from keepstep.app.places import Places, find_interpreter, forget_own_source
from keepstep.app.provisioning import is_wanting, provide_code, provide_packages, split_by_shell
from keepstep.core.job import JobSpec, first_etcd_hosts
from keepstep.core.launch.mpi import LAUNCHED
from keepstep.core.launch.parameter_server import SERVED
from keepstep.core.policy import Policy
from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.contract import (
    BASE,
    Contract,
    ContractOptions,
    Paths,
    choose_strategy,
    count_gpus,
    find_code,
    load_contract,
    parts_of,
    read_mpi,
    user_environment,
)
from keepstep.intake.policy import load_policy


@frozen
class Setup:
    """Everything that was read before the loop begins."""

    options: TrainOptions
    contract: Contract
    policy: Policy
    job: JobSpec
    store: str | None
    environment: dict[str, str]
    places: Places

    @property
    def has_trust(self) -> bool:
        """Whether the hosts prove themselves to each other by certificates of their own."""
        return has_trust(self.policy, len(self.job.hosts), self.store)


def set_up(options: TrainOptions, environ: dict[str, str], init: InitState) -> Setup:
    """Get the job's code, read what there is, get its packages.

    Raises:
        KeepstepError: something can not be used, or is not to be had.
    """
    if options.script is None and is_wanting(Paths(options.base_dir).code):
        provide_code(find_code(options.base_dir, environ), init.signals)
    setup = read_setup(options, environ, init.boot)
    provide_packages(setup.contract, setup.job.python, setup.environment, setup.places.scratch, init.signals)
    check_launcher(setup.job, setup.environment, setup.has_trust, setup.places.code)
    return setup


def read_setup(options: TrainOptions, environ: dict[str, str], boot: int) -> Setup:
    """Turn text into values, once.

    Raises:
        ConfigError: something can not be used.
    """
    wanted = ContractOptions(options.script, options.arguments, options.policy, options.store)
    contract = load_contract(options.base_dir, environ, wanted)
    runtime = environ.get("KEEPSTEP_MAX_RUNTIME")
    known = () if runtime is None else (f"interruption.max_runtime={runtime}",)
    policy = load_policy(contract.policy_source, (*known, *options.overrides))
    named = contract.store or policy.checkpoint.store
    store = None if named == "none" else named
    parts = parts_of(contract, policy.launch.data_service)
    host, hosts = contract.current_host, tuple(each for part in parts for each in part)
    if len(hosts) > 1 and store is None and policy.coordination.endpoints == "embedded":
        demand_trust_off(policy)
    gpus = count_gpus()
    strategy = choose_strategy(contract, policy.launch.strategy, gpus, len(parts.trainers))
    check_use(policy, strategy)
    nonce = uuid.uuid4().hex[:8]
    job = JobSpec(
        name=contract.job_name,
        host=host,
        hosts=hosts,
        node_id=f"{host}-{nonce}",
        boot=boot,
        address=options.address or host,
        port_base=options.port_base,
        run=nonce,
        strategy=strategy,
        python=policy.launch.python,
        script=contract.program,
        arguments=contract.arguments,
        has_store=store is not None,
        etcd_hosts=first_etcd_hosts(hosts) if policy.coordination.endpoints == "embedded" else (),
        watch=watched_folder(policy.checkpoint.watch, contract, store),
        kind=contract.kind,
        evaluates=policy.launch.evaluator == "on",
        feeders=parts.feeders,
        idle=parts.idle,
        machine=options.machine if options.machine is not None else kernel.boot_id(),
        mpi=read_mpi(
            contract, strategy, policy.launch.ranks, gpus, len(parts.trainers), has_program(SMDDPRUN, environ)
        ),
    )
    environment = user_environment(contract, environ)
    check_interpreter(job.python, contract.code_dir, environment.get("PATH"))
    forget_own_source(environment)
    if policy.launch.arguments == "shell":
        job = replace(job, arguments=split_by_shell(job.arguments, environment, contract.code_dir))
    environment["KEEPSTEP_INSTRUMENT"] = policy.launch.instrument
    scratch = options.scratch_dir or Path(tempfile.gettempdir()) / f"keepstep-{contract.job_name}-{host}"
    places = Places(
        scratch, contract.paths.output_data / "keepstep" / host, contract.code_dir, contract.paths.failure_file
    )
    if job.mpi is not None:
        environment |= {"KEEPSTEP_TLS": str(places.tls), "KEEPSTEP_SESSIONS": str(places.sessions)}
    return Setup(options, contract, policy, job, store, environment, places)


def watched_folder(watch: str, contract: Contract, store: str | None) -> str:
    """The folder in which the script's own checkpoints are looked for; empty for none.

    Raises:
        ConfigError: one is wanted, and there is no store to keep them in.
    """
    if store is None and watch not in ("auto", "off"):
        raise ConfigError(f"found {watch}", "a store to keep its files in: checkpoint.store", key="checkpoint.watch")
    folder = str(contract.paths.checkpoints) if watch == "auto" else watch
    return "" if store is None or watch == "off" else os.path.realpath(folder)


def deaf_process(paths: Paths) -> str | None:
    """The name of a training container's process 1 where it hears no SIGTERM; empty where it does, None where it
    can not be looked at, and elsewhere.

    The platform sends the signal to process 1 alone, and the kernel drops what that one has no handler for.
    """
    if paths.base != BASE or not paths.input_config.is_dir():
        return None
    try:
        if kernel.hears(1, signal.SIGTERM):
            return ""
        command = Path("/proc/1/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return os.path.basename(os.fsdecode(command[0])) or "?"


def has_trust(policy: Policy, hosts: int, store: str | None) -> bool:
    """Whether so many hosts, with that store in common, prove themselves to each other by certificates of their own."""
    ours = policy.coordination.endpoints == "embedded" and policy.coordination.tls == "on"
    return hosts > 1 and ours and store is not None


def check_use(policy: Policy, strategy: str) -> None:
    """See that what the policy says of a strategy is said of this one.

    Raises:
        ConfigError: it is said of another one, and would do nothing.
    """
    launch = policy.launch
    if launch.evaluator == "on" and strategy not in SERVED:
        wanted = f"off, or launch.strategy one of {', '.join(SERVED)}"
        raise ConfigError(f"found on with {strategy}", wanted, key="launch.evaluator")
    if launch.ranks and strategy not in LAUNCHED:
        wanted = f"0, or launch.strategy one of {', '.join(LAUNCHED)}"
        raise ConfigError(f"found {launch.ranks} with {strategy}", wanted, key="launch.ranks")


def demand_trust_off(policy: Policy) -> None:
    """Hosts that have no store in common have no way to share an authority: going without is for the user to say.

    Raises:
        ConfigError: the policy wants them to prove themselves.
    """
    if policy.coordination.tls == "on":
        raise ConfigError(
            "several hosts, and no store through which they could share a certificate authority",
            "a store that all hosts can read (--store, checkpoint.store), or coordination.tls=off",
            key="coordination.tls",
            hint="with tls=off whoever reaches etcd's port on a host can stop the job or give it orders",
        )


def check_interpreter(python: str, code_dir: Path, search_path: str | None) -> None:
    """See that the user's interpreter can be started, the way a worker will be.

    Raises:
        ConfigError: it is not there, or is no program.
    """
    if find_interpreter(python, code_dir, search_path) is None:
        raise ConfigError(
            f"found {python}, which is not there or can not be executed",
            "a Python interpreter: a name on PATH, or a path",
            key="launch.python",
        )
