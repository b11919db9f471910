"""Instance groups: which hosts train, and which feed those that do."""

from __future__ import annotations

from typing import Any, NamedTuple

from keepstep.core.names import in_natural_order
from keepstep.errors import ConfigError
from keepstep.intake.contract.resources import instance_groups
from keepstep.intake.contract.values import Contract
from keepstep.intake.files import printable, show

NONE = "none"
_KNOB = "launch.data_service"
_DISTRIBUTION_GROUPS = "sagemaker_distribution_instance_groups"


class Parts(NamedTuple):
    """Every host of the job in one of three parts, each in natural order."""

    trainers: tuple[str, ...]
    feeders: tuple[str, ...]
    idle: tuple[str, ...]


def parts_of(contract: Contract, data_service: str) -> Parts:
    """Who trains, who runs tf.data's service, who does neither.

    Those train whose groups the platform's hyperparameter names; without it, all who do not feed.

    Args:
        data_service: the instance group that runs tf.data's service, or none.

    Raises:
        ConfigError: a group is not there, or is to do both, or nobody is left to train.
    """
    listed = instance_groups(contract.resource_config)
    groups = {str(each["instance_group_name"]): tuple(dict.fromkeys(each["hosts"])) for each in listed}
    named = contract.hyperparameters.get(_DISTRIBUTION_GROUPS)
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise _wrong(contract, named, "a list of instance groups")
    training = [name for name in dict.fromkeys(named or ()) if name in groups]
    feeders: tuple[str, ...] = ()
    if data_service != NONE:
        if data_service not in groups:
            wanted = (
                f"one of {', '.join(sorted(groups))}, or none" if groups else "none: the job has no instance groups"
            )
            raise ConfigError(f"found {show(data_service)}", wanted, key=_KNOB)
        if data_service in training:
            raise _wrong(contract, named, f"groups other than {data_service}, which runs tf.data's service")
        feeders = groups[data_service]
        if not feeders:
            raise ConfigError(f"found {show(data_service)}, which has no hosts", "a group that has some", key=_KNOB)
    rest = tuple(host for host in contract.hosts if host not in feeders)
    trainers = tuple(dict.fromkeys(host for name in training for host in groups[name])) if training else rest
    if not trainers:
        raise ConfigError(
            f"found {show(data_service)}, which all hosts are in", "a group beside it that trains", key=_KNOB
        )
    idle = tuple(host for host in rest if host not in trainers)
    return Parts(in_natural_order(trainers), in_natural_order(feeders), in_natural_order(idle))


def _wrong(contract: Contract, found: Any, wanted: str) -> ConfigError:
    file = printable(str(contract.paths.input_config / "hyperparameters.json"))
    return ConfigError(f"found {show(found)}", wanted, file=file, key=_DISTRIBUTION_GROUPS)
