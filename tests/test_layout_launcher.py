"""The launcher's file is found on its own command line; ranks never see it otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.plan.layout import Launched, Process, accelerate_file, find_launcher_config, parents
from windlass.plan.layout.launcher import FLAGS, SHORT, default_config

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
SCRIPT = """
import json, os, sys
from pathlib import Path
from windlass.errors import UserError
from windlass.plan.layout import accelerate_file, find_launcher_config, parents
above = parents()
try:
    file = accelerate_file(None, os.environ, above)
    said = {name: wish.value for name, wish in file.wishes.items()}
    path = str(file.path)
except UserError as error:
    said, path = str(error), ""
try:
    blind = str(find_launcher_config(os.environ, ()))
except UserError as error:
    blind = str(error)
Path(sys.argv[1]).write_text(json.dumps({"said": said, "path": path, "blind": blind}))
"""


def found(*words: str, cwd: Path | None = Path("/somewhere")) -> Launched | None:
    return find_launcher_config({}, [Process(words, cwd)])


@pytest.mark.parametrize(
    "start",
    [
        ("accelerate", "launch"),
        ("/usr/bin/python3", "/home/me/.local/bin/accelerate", "launch"),
        ("python", "-u", "-m", "accelerate.commands.accelerate_cli", "launch"),
        ("/opt/bin/accelerate-launch",),
        ("python", "-m", "accelerate.commands.launch"),
        ("python", "/site-packages/accelerate/commands/launch.py"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("option", [("--config_file", "a/f.yaml"), ("--config-file=a/f.yaml",)], ids=" ".join)
def test_the_file_is_found_however_the_launcher_was_started(start: tuple[str, ...], option: tuple[str, ...]) -> None:
    launched = found(*start, *option, "-m", "windlass", "train", "run.yaml")
    assert launched == Launched(Path("/somewhere/a/f.yaml"), ())


def test_options_are_read_up_to_the_script_and_no_further() -> None:
    launched = found(
        *(
            "accelerate",
            "launch",
            "-q",
            "--num-machines",
            "2",
            "--use_fsdp",
            "--fsdp_offload_params=true",
            "--tee",
            "3",
        ),
        *("-m", "windlass", "train", "run.yaml", "--config_file", "mine.yaml", "--num_machines", "9"),
    )
    assert launched == Launched(
        None,
        (("num_machines", "2"), ("distributed_type", "FSDP"), ("fsdp_offload_params", "true"), ("tee", "3")),
    )


def test_an_absolute_path_and_an_unknown_folder() -> None:
    assert found("accelerate", "launch", "--config_file", "/etc/f.yaml", "x.py") == Launched(Path("/etc/f.yaml"), ())
    assert found("accelerate", "launch", "--config_file", "f.yaml", "x.py", cwd=None) == Launched(Path("f.yaml"), ())


@pytest.mark.parametrize(
    "words",
    [
        ("bash", "-c", "accelerate launch --config_file f.yaml x.py"),
        ("python", "train.py", "accelerate", "launch"),
        ("accelerate", "config"),
        ("torchrun", "--nproc_per_node", "2", "train.py"),
        ("",),
        (),
    ],
    ids=str,
)
def test_other_processes_are_no_launcher(words: tuple[str, ...]) -> None:
    assert found(*words) is None


def test_the_launcher_may_be_further_up() -> None:
    above = [
        Process(("python", "-m", "windlass", "train"), Path("/a")),
        Process(("python", "accelerate", "launch", "--config_file", "f.yaml", "x.py"), Path("/b")),
    ]
    assert find_launcher_config({"FSDP_VERSION": "2"}, above) == Launched(Path("/b/f.yaml"), ())


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS"])
def test_settings_without_a_visible_launcher_ask_for_the_file(variable: str) -> None:
    with pytest.raises(UserError, match="--accelerate") as caught:
        find_launcher_config({variable: "true"}, [])
    assert variable in str(caught.value)


def test_without_a_launcher_there_is_no_file() -> None:
    assert accelerate_file(None, {"PATH": "/bin", "ACCELERATE_USE_CPU": "true"}, []) is None


def test_options_alone_are_settings_too() -> None:
    words = ("accelerate", "launch", "--use_fsdp", "--num_machines", "2", "--num_processes", "4", "x.py")
    file = accelerate_file(None, {"HOME": "/nowhere"}, [Process(words, None)])
    assert file is not None
    assert file.path is None
    assert {name: wish.value for name, wish in file.wishes.items()} == {"sharded": True, "nodes": 2, "ranks": 4}


@pytest.mark.parametrize("home", ["HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_the_default_file_is_read_where_the_launcher_reads_it(home: str, tmp_path: Path) -> None:
    folder = {"HF_HOME": ".", "XDG_CACHE_HOME": "huggingface", "HOME": ".cache/huggingface"}[home]
    path = tmp_path / folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 5\n")
    words = ("accelerate", "launch", "x.py")
    environ = {home: str(tmp_path)}
    file = accelerate_file(None, environ, [Process(words, None)])
    assert file is not None
    assert file.wishes["nodes"].value == 5
    # Accelerate reads the same place.
    code = "from accelerate.commands.config.config_args import default_config_file as f; print(f)"
    if home == "HF_HOME":  # one start of Accelerate is enough
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert Path(out.stdout.strip()) == default_config(environ) == path


def test_a_given_file_goes_first_and_must_not_differ_from_the_launchers() -> None:
    mine, other = EXAMPLES / "fsdp.yaml", EXAMPLES / "fsdp-3xH200.yaml"
    same = [Process(("accelerate", "launch", "--config_file", "fsdp.yaml", "x.py"), EXAMPLES)]
    environ = {"ACCELERATE_USE_FSDP": "true"}
    for above in ([], same):
        file = accelerate_file(mine, environ, above)
        assert file is not None
        assert file.path == mine
    with pytest.raises(UserError, match="another file than the launcher") as caught:
        accelerate_file(other, environ, same)
    assert str(mine) in str(caught.value)
    assert str(other) in str(caught.value)


def test_flags_are_those_that_accelerate_knows() -> None:
    """An option taken for a flag, or the other way round, would shift every word after it."""
    from accelerate.commands.launch import launch_command_parser

    flags: set[str] = set()
    for action in launch_command_parser()._actions:
        for option in action.option_strings:
            if option.startswith("--") and action.nargs == 0:
                flags.add(option.removeprefix("--").replace("-", "_"))
            elif not option.startswith("--") and option not in SHORT:
                raise AssertionError(f"{option} is not known")
    assert flags == set(FLAGS)


def test_parents_are_this_process_own() -> None:
    above = parents()
    assert above
    assert len(above) <= 16
    assert parents(Path("/nowhere")) == ()


def launch(folder: Path, text: str) -> dict[str, object]:
    """One rank on the CPU, started by the real launcher, which reads a file in its own folder."""
    (folder / "config").mkdir()
    (folder / "config" / "fsdp.yaml").write_text(text)
    (folder / "rank.py").write_text(SCRIPT)
    out = folder / "out.json"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config/fsdp.yaml"]
    command += ["--main_process_port", "0", "--mixed_precision", "bf16", "rank.py", str(out)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_"))}
    subprocess.run(command, cwd=folder, env=environ, check=True, timeout=180, capture_output=True)
    loaded: dict[str, object] = json.loads(out.read_text())
    return loaded


def test_a_rank_of_the_real_launcher_reads_its_file(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 1\nnum_machines: 1\nmixed_precision: bf16\n"
    result = launch(tmp_path, text + "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n")
    assert result["path"] == str(tmp_path / "config/fsdp.yaml")
    assert result["said"] == {
        "sharded": True,
        "ranks": 1,
        "nodes": 1,
        "precision": "bf16",
        "reshard_after_forward": False,
    }
    assert "--accelerate" in str(result["blind"])


def test_a_misspelt_key_is_seen_although_the_launcher_swallowed_it(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 1\nnum_machines: 1\n"
    result = launch(tmp_path, text + "fsdp_config:\n  fsdp_version: 2\n  fsdp_offlaod_params: true\n")
    assert "did you mean fsdp_offload_params?" in str(result["said"])
