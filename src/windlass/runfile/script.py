"""The run file of `kind: script`: any PyTorch script that torchrun could start, on the same machines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from windlass.runfile.fields import Watch
from windlass.runfile.kinds import Count, LooseText, Natural, RunName, Section, Text
from windlass.runfile.machines import Cluster


def _module(value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"must be a module's name such as package.train, not {value!r}")
    return value


def _file(value: str) -> str:
    if value.startswith("-"):
        raise ValueError(f"would be read as an option of Python: {value!r}; write ./{value}")
    return value


class Script(Section):
    """The script that every rank runs, as torchrun would start it."""

    path: Annotated[Text, AfterValidator(_file)] | None = None
    """Python file, relative to the folder that the run is started in; this or `module`."""
    module: Annotated[Text, AfterValidator(_module)] | None = None
    """Python module, as `python -m` takes it; this or `path`."""
    args: list[LooseText] = Field(default=[])
    """Its arguments, word by word: [--epochs, 2]. No shell interprets them."""
    output_dir: Text = "run"
    """The run folder, which the ranks find in WINDLASS_OUTPUT_DIR."""
    workers: Natural = 0
    """Processes per rank that prepare batches; sets the CPUs and /dev/shm to request."""


class Ranks(Section):
    """How many processes. How they share the work is up to the script."""

    ranks: Count | None = None
    """Processes, one per GPU. Default: cluster.nodes x cluster.gpus_per_node."""


class ScriptRun(Section):
    """One run of a script: what is started, and the machines it runs on."""

    kind: Literal["script"]
    """What to run: script runs any PyTorch script, lora trains a language model's adapter and has other sections."""
    name: RunName | None = None
    """Name of the run and of the submitted job. Default: made from script.output_dir."""
    script: Script = Field(default_factory=Script)
    """The script that every rank runs, as torchrun would start it."""
    layout: Ranks = Field(default_factory=Ranks)
    """How many processes. How they share the work is up to the script."""
    cluster: Cluster = Field(default_factory=Cluster)
    """The machines, and how a job is submitted to them."""
    watch: Watch = Field(default_factory=Watch)
    """Alarms while the run trains, and what to do about them."""

    folder_key: ClassVar[str] = "script.output_dir"

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.script.output_dir

    @property
    def workers(self) -> int:
        """Processes per rank that prepare batches."""
        return self.script.workers

    @property
    def ranks(self) -> int:
        """Processes of the run, one per GPU."""
        return self.layout.ranks or self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def command(self) -> list[str]:
        """What follows the name of the interpreter."""
        script = self.script
        return [*(["-m", script.module] if script.module else [script.path or ""]), *script.args]
