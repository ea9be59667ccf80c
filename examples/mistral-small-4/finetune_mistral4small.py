#!/usr/bin/env python3
"""Fine-tune Mistral Small 4 with LoRA: `windlass train` under the name and options of the published recipe.

    python finetune_mistral4small.py --config run.yaml --override train.learning_rate=1e-4 --override lora.r=32

    accelerate launch --config_file fsdp.yaml --machine_rank $RANK --main_process_ip $MASTER_ADDR \\
        finetune_mistral4small.py --config run.yaml

Alone it starts this machine's ranks; under `accelerate launch` or torchrun it is one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from windlass.cli import main as windlass


def arguments(given: Sequence[str] | None = None) -> list[str]:
    """The recipe's options in windlass's words."""
    parser = argparse.ArgumentParser(description="Fine-tune Mistral Small 4 with LoRA.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file, YAML")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="set one key; repeatable")
    parser.add_argument("--debug-freq", type=int, metavar="N", help="measure GPUs and experts every N steps")
    parser.add_argument("--resume", action="store_true", help="resume an unfinished run")
    args = parser.parse_args(given)
    named = [word for override in args.override for word in ("--override", override)]
    measured = [] if args.debug_freq is None else ["--debug-freq", str(args.debug_freq)]
    return ["train", args.config, *named, *measured, *(["--resume"] if args.resume else [])]


if __name__ == "__main__":
    windlass(arguments(sys.argv[1:]))
