"""Which file `accelerate launch` was given. Ranks are told its settings with defaults filled in, never the file:
a misspelt key has vanished by then, so the launcher's own command line is read instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UserError
from windlass.plan.layout.accelerate import AccelerateFile, read_accelerate, read_options

# Options of `accelerate launch` (1.15) that take no value, and the key that some of them stand for.
FLAGS: dict[str, tuple[str, str] | None] = {
    "use_fsdp": ("distributed_type", "FSDP"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "use_megatron_lm": ("distributed_type", "MEGATRON_LM"),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
    "tpu": ("distributed_type", "XLA"),
    "cpu": ("use_cpu", "true"),
    "enable_cpu_affinity": ("enable_cpu_affinity", "true"),
    "same_network": ("same_network", "true"),
    "downcast_bf16": ("downcast_bf16", "true"),
    "debug": ("debug", "true"),
    "dynamo_use_fullgraph": ("dynamo_use_fullgraph", "true"),
    "dynamo_use_dynamic": ("dynamo_use_dynamic", "true"),
    "dynamo_use_regional_compilation": ("dynamo_use_regional_compilation", "true"),
    "fp8_use_autocast_during_eval": ("fp8_use_autocast_during_eval", "true"),
    "use_parallelism_config": None,
    "quiet": None,
    "module": None,
    "no_python": None,
    "help": None,
    "tpu_cluster": None,
    "no_tpu_cluster": None,
    "tpu_use_sudo": None,
}
SHORT = {"-q": "quiet", "-m": "module", "-h": "help", "-t": "tee"}
MARKS = ("ACCELERATE_USE_FSDP", "FSDP_")  # what only such a launcher leaves in a rank's environment


@dataclass(frozen=True, slots=True)
class Process:
    """A process above this one."""

    cmdline: tuple[str, ...]
    cwd: Path | None


@dataclass(frozen=True, slots=True)
class Launched:
    """What `accelerate launch` was told. `config` is None where it was told no file."""

    config: Path | None
    options: tuple[tuple[str, str], ...]


def parents(proc: Path = Path("/proc"), pid: int | None = None, limit: int = 16) -> tuple[Process, ...]:
    """The processes above this one, nearest first; none where the system does not show them."""
    found: list[Process] = []
    here = proc / ("self" if pid is None else str(pid))
    while len(found) < limit:
        try:
            # The name in parentheses may hold spaces: what follows the last one is state, then the parent.
            above = int((here / "stat").read_text().rpartition(")")[2].split()[1])
            here = proc / str(above)
            cmdline = (here / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
        except (OSError, ValueError, IndexError):
            break
        found.append(Process(tuple(cmdline), _cwd(here)))
    return tuple(found)


def _cwd(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None


def find_launcher_config(environ: Mapping[str, str], above: Sequence[Process]) -> Launched | None:
    """None where no `accelerate launch` sharded this run. The default file is named even where it does not exist."""
    for process in above:
        arguments = _launch_arguments(process.cmdline)
        if arguments is None:
            continue
        options = _options(arguments)
        config = options.pop("config_file", None)
        if config is None:
            return Launched(None, tuple(options.items()))
        path = Path(config)
        return Launched(path if process.cwd is None else process.cwd / path, tuple(options.items()))
    marks = sorted(name for name in environ if name == MARKS[0] or name.startswith(MARKS[1]))
    if marks:
        raise UserError(
            f"{marks[0]} says that a launcher was given FSDP settings, and its command line cannot be read here",
            "environment",
            "give the launcher's file as well: --accelerate fsdp.yaml",
        )
    return None


def default_config(environ: Mapping[str, str]) -> Path:
    """The file that `accelerate launch` reads when it is told none (it is written by `accelerate config`)."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
    home = Path(environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()
    # The older JSON file counts only where it is the only one.
    yaml_file, json_file = (home / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json"))
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def accelerate_file(given: Path | None, environ: Mapping[str, str], above: Sequence[Process]) -> AccelerateFile | None:
    """The Accelerate settings of this run: `--accelerate`, else the launcher's file and options, else none."""
    if given is not None:
        launched = find_launcher_config({}, above)  # the file is at hand: marks in the environment need no proof
        if launched and launched.config and launched.config.resolve() != given.resolve():
            raise UserError(
                f"--accelerate names another file than the launcher: {launched.config}",
                str(given),
                "give the same file to both, or only to the launcher",
            )
        return read_accelerate(given, launched.options if launched else ())
    launched = find_launcher_config(environ, above)
    if launched is None:
        return None
    if launched.config:
        return read_accelerate(launched.config, launched.options)
    default = default_config(environ)
    if default.is_file() and ("use_cpu", "true") not in launched.options:
        return read_accelerate(default, launched.options)
    return read_options(launched.options)


def _launch_arguments(cmdline: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch`, in any of the ways that it can be started."""
    for place, word in enumerate(cmdline):
        name = Path(word).name
        rest = list(cmdline[place + 1 :])
        if name == "accelerate-launch" or word == "accelerate.commands.launch" or word.endswith("commands/launch.py"):
            return rest
        if (
            name == "accelerate" or word.endswith("accelerate_cli.py") or word == "accelerate.commands.accelerate_cli"
        ) and (rest[:1] == ["launch"]):
            return rest[1:]
        # Options of the interpreter and `-m` may stand before; the first other word is another program's.
        if place > 0 and not word.startswith("-"):
            return None
    return None


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """The launcher's options up to the script: what follows belongs to the script."""
    found: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "--":
            break
        name, has_value, value = word.partition("=")
        name = SHORT.get(name) or name.removeprefix("--").replace("-", "_")
        if name in FLAGS:
            meaning = FLAGS[name]
            if meaning:
                found[meaning[0]] = meaning[1]
        else:
            found[name] = value if has_value else next(words, "")
    return found
