"""What the user wants: YAML to a `Policy`, with errors that name file, line and key.

What lives here: YAML within limits, presets, overrides, the table that explains a policy, its JSON Schema. What must
never enter: what a knob means (`core.policy`), the environment, anything of SageMaker.
Start reading at `load_policy`.
"""

from __future__ import annotations

from keepstep.intake.policy.explain import explain, json_schema
from keepstep.intake.policy.load import SourcedPolicy, load_policy, load_sourced_policy
from keepstep.intake.policy.presets import preset_names

__all__ = ["SourcedPolicy", "explain", "json_schema", "load_policy", "load_sourced_policy", "preset_names"]
