"""The run file of `kind: script`: any PyTorch script that torchrun could start, on the same machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from windlass.runfile.fields import Watch
from windlass.runfile.kinds import Count, Natural, RunName, Section, Text
from windlass.runfile.machines import Cluster

SECTIONS = ("script", "layout", "cluster", "watch")


def _argument(value: Any) -> Any:
    """8 and 0.5 are as good as "8" and "0.5" on a command line; true and false would be anybody's guess."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _module(value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"must be a module's name such as package.train, not {value!r}")
    return value


def _file(value: str) -> str:
    if value.startswith("-"):
        raise ValueError(f"would be an option of Python's: {value!r}; write ./{value}")
    return value


class Script(Section):
    """The script that every rank runs, as torchrun would start it."""

    path: Annotated[Text, AfterValidator(_file)] | None = None
    """Python file, from the folder that the run is started in; this or `module`."""
    module: Annotated[Text, AfterValidator(_module)] | None = None
    """Python module, as `python -m` takes it; this or `path`."""
    args: list[Annotated[str, BeforeValidator(_argument, json_schema_input_type=str | float)]] = Field(default=[])
    """Its arguments, word by word: [--epochs, 2]. They reach it as they stand; no shell looks at them."""
    output_dir: Text = "run"
    """The run folder: the meter writes there, and windlass what it knows of the run. The ranks find it in
    WINDLASS_OUTPUT_DIR."""
    workers: Natural = 0
    """Processes per rank that prepare batches: processors and /dev/shm are asked for by it."""


class Ranks(Section):
    """How many processes. How they share the work is the script's matter."""

    ranks: Count | None = None
    """Processes, one per GPU. Default: cluster.nodes x cluster.gpus_per_node."""


class ScriptRun(Section):
    """One run of a script: what is started, and the machines it runs on."""

    kind: Literal["script"]
    """script: any PyTorch script. Left out, or lora: a language model's adapter, with other sections."""
    name: RunName | None = None
    """Name of the run and of the job that is submitted. Default: made from script.output_dir."""
    script: Script = Field(default_factory=Script)
    """The script that every rank runs, as torchrun would start it."""
    layout: Ranks = Field(default_factory=Ranks)
    """How many processes. How they share the work is the script's matter."""
    cluster: Cluster = Field(default_factory=Cluster)
    """The machines: how many, which GPUs and fabrics, and how a job gets onto them."""
    watch: Watch = Field(default_factory=Watch)
    """What is looked for while the run trains, and what happens when it is found."""

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


ALARMS = tuple(name for name in Watch.model_fields if Watch.model_fields[name].default == "warn")
NOT_WATCHED = {  # keys of `watch` that are of language models
    "min_supervised_fraction": "a script's data are its own",
    "dead_experts": "only a language model's experts are counted",
}


def contradictions(run: ScriptRun) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Keys, problem, hint."""
    script, watch = run.script, run.watch
    if script.path and script.module:
        yield ("script.path", "script.module"), "a file and a module are named", "keep the one that is to be started"
    if not script.path and not script.module:
        hint = "give script.path: train.py, or script.module: package.train"
        yield ("script.path", "kind"), "a script is to be run, and none is named", hint
    for name in ALARMS:
        if getattr(watch, name) == "checkpoint":
            what = "nobody but the script can save a checkpoint"
            yield (
                (f"watch.{name}",),
                what,
                "take warn or stop; a script can save when it gets SIGTERM, which stop sends",
            )
    if watch.non_finite == "skip":
        what = "nobody but the script can leave a step out"
        yield ("watch.non_finite",), what, "take stop, and let the script leave it out (GradScaler does)"


def remarks(where: Callable[[str], str]) -> list[str]:
    """What was said and has no effect."""
    said = {key: where(f"watch.{key}") for key in NOT_WATCHED}
    return [f"{said[key]}: no effect: {why}" for key, why in NOT_WATCHED.items() if not said[key].startswith("default")]
