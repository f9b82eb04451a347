# Owns: the commands that bring and make models: pull, train.
# Promises: a folder or prompt file that will not do is refused before anything is fetched.
# Never: computes.
"""Commands that bring models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import (
    Device,
    Dtype,
    Model,
    check_folder,
    option,
)


@command
def train(
    model: Model = "smollm2",
    out: Annotated[Path, option(help="Folder of the session: text, checkpoints, bf16/ and int8/.")] = Path("drafter"),
    prompts: Annotated[Path | None, option(help="FILE.jsonl to answer; without it the model asks itself.")] = None,
    minutes: Annotated[float, option(help="For all of it: writing text, training.")] = 10.0,
    resume: Annotated[Path | None, option(help="Folder of an earlier session, continued in place.")] = None,
    block_size: Annotated[int, option(help="Tokens of a draft block, the anchor included.")] = 16,
    layers: Annotated[int, option(help="Layers of the drafter.")] = 5,
    lr: Annotated[float, option(help="Peak learning rate.")] = 2e-3,
    mask_token_id: Annotated[int | None, option(help="Default: an unused special token.")] = None,
    seed: Annotated[int, option(help="Of text, initialisation and anchors.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a drafter for a model on what the model itself writes."""
    from ratoon.cli.show import fetch_bar, trained, training_bar
    from ratoon.lab.doctor.files import revision_of
    from ratoon.models.hub import resolve
    from ratoon.train.prompts import read_prompts

    check_folder(resume or out, "--resume" if resume else "--out")
    if prompts is not None and resume is None:
        read_prompts(prompts)
    import torch

    from ratoon.runtime.setup import choose_device
    from ratoon.train.session import fitting_recipe, teach

    where = choose_device(device)
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and where.type == "cuda") else torch.float32
    changes = {"minutes": minutes, "block_size": block_size, "layers": layers, "lr": lr, "seed": seed}
    recipe = fitting_recipe(where, **changes, mask_token_id=mask_token_id)
    with fetch_bar() as progress:
        path = resolve(model, progress)
    with training_bar(60 * minutes) as report:
        record = teach(
            path,
            resume or out,
            recipe,
            device=where,
            dtype=kind,
            prompts=prompts,
            resume=resume,
            provenance={"target": model, "target_revision": revision_of(path)},
            report=report,
        )
    print(trained(record, resume or out))


@command
def pull(
    model: Annotated[str, typer.Argument(help="smollm2 or a hub id, owner/name.")],
    revision: Annotated[str | None, option(help="Branch, tag or commit (default: main).")] = None,
) -> None:
    """Fetch a model or a drafter. Resumes where it stopped; takes no code."""
    from ratoon.cli.show import fetch_bar
    from ratoon.models.hub import pull as fetch_model

    with fetch_bar() as progress:
        path = fetch_model(model, revision, progress)
    print(path)
