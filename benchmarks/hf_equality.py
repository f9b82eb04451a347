# Owns: the engine's greedy texts of a real model against Hugging Face's network on the same weights.
# Promises: float32; every token is judged, and a place where the two best logits are nearly equal is counted as such.
# Never: looks at speed, or trusts one of our own passes as the oracle.
"""`python -m benchmarks.hf_equality [--model smollm2] [--prompts humaneval] [--limit 40] [--max-tokens 64]`

One Hugging Face pass over prompt and answer: greedy decoding gives this answer if each token is the argmax before it.
The GGUF is read twice, by us and by transformers. Exit code 1 if a token is not Hugging Face's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ratoon.core.request import SamplingParams
from ratoon.lab.prompts import load_prompts
from ratoon.lab.record import encode
from ratoon.models.hub import resolve
from ratoon.runtime.engine import Engine

NEAR_TIE = 1e-4


def oracle(path: Path) -> torch.nn.Module:
    """transformers' own reading of a GGUF file or a safetensors directory, in float32."""
    if path.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # A tied head has no tensor of its own in the file.
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def judge(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """How many tokens are not Hugging Face's choice, and how many of those are near-ties."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    taken = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = logits.amax(1) - taken
    return int((behind > 0).sum()), int(((behind > 0) & (behind < NEAR_TIE)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", default="humaneval")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    path, model = resolve(args.model), None
    for method in ("ar", "tree"):
        params = SamplingParams(max_tokens=args.max_tokens)
        with Engine(args.model, method=method, budget=15, dtype="float32", max_rows=8, max_model_len=2048) as engine:
            prompts = [encode(engine, prompt) for prompt in load_prompts(args.prompts, args.limit)]
            answers = [list(output.token_ids) for output in engine.generate(prompts, params)]
        model = model or oracle(path)
        judged = [judge(model, *pair) for pair in zip(prompts, answers, strict=True)]
        others, ties = (sum(column) for column in zip(*judged, strict=True))
        tokens = sum(map(len, answers))
        print(f"{method}: {len(answers)} texts, {tokens} tokens, {others - ties} not Hugging Face's, {ties} near-ties")
        if others > ties:
            sys.exit(1)


if __name__ == "__main__":
    main()
