"""Generation without and with cuDNN's attention: the time of a token, and the number of equal tokens.

    python -m benchmarks.gpu.generation RUN_FOLDER

The launcher generates without cuDNN, which plans a kernel for each new length of a sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from titan_launch.core.process import exit_process
from titan_launch.inference.generation import Sampling, generate_tokens
from titan_launch.inference.language_model import LanguageModel, device_of, load_language_model
from titan_launch.inference.saved_model import open_saved_model

_PROMPT = "abc " * 16


def main() -> int:
    """Generate once to warm up, then without and with cuDNN, and print one line. Return the exit status."""
    parser = argparse.ArgumentParser(description="Generate without and with cuDNN's attention.")
    parser.add_argument("folder", type=Path, help="folder of a run that trained on text")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--without-values", action="store_true", help="print no times and compare no tokens")
    options = parser.parse_args()
    model = load_language_model(open_saved_model(options.folder), options.folder, device_of(None), torch.bfloat16)
    model = replace(model, end_tokens=frozenset())
    torch.backends.cuda.enable_cudnn_sdp(False)
    list(timed_tokens(model, options.tokens))
    results = []
    for has_cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        results.append([*zip(*timed_tokens(model, options.tokens), strict=True)])
    (tokens, times), (other_tokens, other_times) = results
    if options.without_values:
        print(f"ran: {len(tokens)} tokens without cuDNN, {len(other_tokens)} with it")
    else:
        equal = sum(one == other for one, other in zip(tokens, other_tokens, strict=True))
        of_token = [f"{1000 * statistics.median(seconds):.1f} ms" for seconds in (times, other_times)]
        print(f"a token: {of_token[0]} without cuDNN, {of_token[1]} with it; {equal} of {len(tokens)} tokens are equal")
    return 0


def timed_tokens(model: LanguageModel, num_tokens: int) -> Iterator[tuple[int, float]]:
    """Yield tokens with the time of each in seconds. The choice of a token waits for the device."""
    began = time.perf_counter()
    for token in generate_tokens(model, model.encode(_PROMPT), num_tokens, Sampling()):
        now = time.perf_counter()
        yield token, now - began
        began = now


if __name__ == "__main__":
    exit_process(main())
