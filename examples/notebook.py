"""Use ladder from Python: tune on paper, look at the candidates, load the answer.

    python notebook.py

It takes a few seconds and needs no GPU. The `# %%` lines make cells in editors that know them.
"""

# %% Tune. The machine is simulated; leave out launcher and machine to tune on your own GPUs.
import ladder

result = ladder.tune("llama-2-7b", launcher="simulated", machine="a100-40", output="best_config.json", quiet=True)
print(result)

# %% Look at the candidates. The frame has one row for each.
measured = result.trials[result.trials["tokens_per_second"].notna()]
columns = ["rung", "checkpointing", "micro_batch", "tokens_per_second", "peak_device_gib", "outcome"]
print(measured.sort_values("tokens_per_second", ascending=False)[columns].to_string(index=False))

# %% Load the answer. The section "ladder" says how it was found; the rest is for deepspeed.initialize.
config = ladder.load_best_config("best_config.json")
print(config["ladder"]["rung"], "at micro-batch", config["train_micro_batch_size_per_gpu"])
print("ZeRO stage", result.deepspeed_config()["zero_optimization"]["stage"])
