"""Measures how much other programs on the same cores slow down a training step, by OpenMP's wait policy."""

import multiprocessing
import os
import statistics
import subprocess
import sys

STEP = """
import time, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(
    "smollm3", vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
model = AutoModelForCausalLM.from_config(config)
rows = torch.randint(0, 2048, (16, 128))
model(input_ids=rows, labels=rows).loss.backward()
start = time.perf_counter()
for _ in range(10):
    model(input_ids=rows, labels=rows).loss.backward()
print((time.perf_counter() - start) / 10)
"""


def spin() -> None:
    while True:
        pass


def measure(policy: str, competitors: int) -> float:
    """Return the seconds per step of survival's small model (16 rows of 128 tokens) while `competitors` spin."""
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(competitors)]
    for other in others:
        other.start()
    environment = {**os.environ, "OMP_WAIT_POLICY": policy}
    output = subprocess.run([sys.executable, "-c", STEP], env=environment, stdout=subprocess.PIPE, check=True).stdout
    for other in others:
        other.terminate()
    return float(output)


if __name__ == "__main__":
    print("| other busy programs | ACTIVE, ms per step | PASSIVE, ms per step | ratio |\n|---:|---:|---:|---:|")
    for competitors in (0, 1, 2):
        rounds = [(measure("ACTIVE", competitors), measure("PASSIVE", competitors)) for _ in range(3)]
        active, passive = (1000 * statistics.median(side) for side in zip(*rounds, strict=True))
        print(f"| {competitors} | {active:.0f} | {passive:.0f} | {active / passive:.1f} |")
