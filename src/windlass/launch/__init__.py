"""`windlass submit`: the plan as files that start the run on a platform, and the call that does.

job         what every launcher needs of the plan
script      launch.sh, which runs on every node, and accelerate.yaml
meeting     runs beside the ranks of every node: who comes, who leaves
interfaces  whether those that the environment names are there
runai       the submit command; runai_api: the same as REST, and sent
local       a run that no platform looks after
kubernetes  a ConfigMap and a job of whichever kind the cluster has
pods        what is wrong, or worth a word, with any run that goes into pods
submit      files into the run folder, then one call of the platform's own client; look at it, stop it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

PLATFORMS = ("local", "script", "runai", "kubernetes")


def render(
    plan: AnyPlan,
    to: str,
    *,
    overrides: Sequence[str] = (),
    accelerate: Path | None = None,
    engine: str | None = None,
    version: str | None = None,
    api: bool = False,
) -> dict[str, str]:
    """Named texts. Raises everything that would keep the run from starting there.

    overrides, accelerate: what the plan was made with besides the run file; they travel with it.
    engine, version: what the cluster has, where that was asked; else the run file's word, or a default.
    api: for Run:ai the REST request too.
    """
    from windlass.launch.submit import texts

    return texts(plan, to, overrides=overrides, accelerate=accelerate, engine=engine, version=version, api=api)
