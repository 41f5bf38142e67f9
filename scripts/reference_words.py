"""What the code does not say: the sentences of the reference pages about rungs, outcomes, exit codes and keys."""

from __future__ import annotations

RUNGS = {
    # on each GPU, what it costs, when to use it; N parameters, W GPUs
    "zero0": ("everything: 16 N bytes, 20 N during the optimizer step", "reducing gradients", "the model is small"),
    "zero1": (
        "parameters, gradients, optimizer / W",
        "gathering the updated parameters once per step",
        "you have several GPUs, and the rest fits",
    ),
    "zero2": (
        "parameters, gradients / W, optimizer / W",
        "reducing gradients in each micro-step, where `zero1` does it once per step; the rest as `zero1`",
        "you have several GPUs and few accumulation steps",
    ),
    "zero1+opt-cpu": (
        "parameters, gradients",
        "an optimizer on the CPU, and transfers once per step",
        "you have many accumulation steps and some memory left",
    ),
    "zero2+opt-cpu": (
        "parameters, gradients / W",
        "an optimizer on the CPU, and transfers in each micro-step",
        "host memory is plentiful",
    ),
    "zero3": (
        "parameters, gradients and optimizer / W",
        "gathering the parameters of each layer when they are used",
        "several GPUs share a fast link",
    ),
    "zero3+opt-cpu": (
        "parameters and gradients / W",
        "the costs of `zero3` and of an optimizer on the CPU",
        "`zero3` lacks the memory of the optimizer",
    ),
    "zero3+param-cpu": (
        "gradients and optimizer / W",
        "parameters cross PCIe when they are used",
        "it is rarely the best",
    ),
    "zero3+param-cpu+opt-cpu": (
        "activations and a few layers",
        "PCIe transfers, and an optimizer on the CPU",
        "the freed memory allows a larger micro-batch",
    ),
    "zero3+param-cpu+opt-cpu+lean": (
        "the same with smaller buffers",
        "more and smaller messages",
        "only a few GiB are missing",
    ),
    "zero3+opt-nvme": ("parameters and gradients / W", "the drive's speed, in each step", "host memory is short"),
    "zero3+param-nvme+opt-nvme": (
        "activations and a few layers",
        "the drive's speed, in each micro-step",
        "nothing else fits",
    ),
}

OUTCOMES = {
    # what happened, what to do
    "fits": ("Every rank finished within the memory limit.", "–"),
    "gpu_oom": (
        "A GPU ran out of memory, or a rank used more than the limit. The sentence says where, and what was asked for "
        "and free, or used.",
        "Nothing: the search continues. A lower `--seq-len`, more GPUs or `--nvme-path` widen what fits.",
    ),
    "host_oom": (
        "The kernel or the allocator refused host memory, or `/dev/shm` is full, through which NCCL shares memory. "
        "A candidate that is predicted to need over 10 % more than the ranks may use gets no trial.",
        "Give `--host-memory` if the machine reports the wrong amount, use fewer ranks, or try rungs without offload. "
        "In a container, enlarge `/dev/shm` (`docker run --shm-size`).",
    ),
    "pinned_oom": (
        "Page-locked host memory could not be allocated, although the GPU has room.",
        "Close other programs that lock memory. DeepSpeed rounds each locked buffer up to a power of two.",
    ),
    "disk_full": (
        "The NVMe folder is full.",
        "Free space there. `ladder doctor --nvme-path` measures the folder.",
    ),
    "hang": (
        "A rank was silent for longer than its deadline.",
        "Read the trial's files in the run folder, check the NCCL settings, and look for a stopped process.",
    ),
    "crash": (
        "A rank ended for another reason, or its losses differ from those of the reference rung.",
        "Read the error in the sentence. The traceback is in the rank's file under `trials/`, and the stack of a "
        "segmentation fault in its log.",
    ),
    "unsupported": (
        "DeepSpeed or the model refused this configuration, or an operator could not be built.",
        "Read the sentence. A rung that cannot work here at all gets no trial, and its reason names what is missing: a "
        "compiler, libaio or a drive.",
    ),
    "cancelled": (
        "You interrupted the trial. What it had measured is kept; the candidate that ran then has no outcome.",
        "Start the same command again. It continues where it stopped.",
    ),
}

EXITS = {
    # by class of error: what to do
    "LadderError": "Report it, with the traceback and the output of `ladder doctor --format json`.",
    "UsageError": "Change the command as the sentence says. It also ends so if the time budget ran out before "
    "anything was proven, if a file is not what it should be, if your own script failed, or if no rung can work here.",
    "NothingFitsError": "Read the sentence: it names what would fit. After `verify`: tune again.",
    "EnvironmentFaultError": "Run `ladder doctor`, which names a fix for each problem.",
    "ModelNotAccessibleError": "Give a folder, a `config.json` or a bundled shape. For a gated model, set `HF_TOKEN`.",
    "SlowerThanPromisedError": "Only `verify` ends so. Look for other load on the machine, or tune again.",
    "MoreMemoryThanPromisedError": "Only `verify` ends so. Look at what changed in the script or its data, or tune "
    "again.",
    "FewerStepsThanPlannedError": "Only `run` ends so. See what ended the training, or how its loop counts its steps.",
}
SIGNALS = {
    # what the shell reports for a program that a signal ended
    "129": ("The terminal was lost.", "Start the same command again; all measurements are kept."),
    "130": ("You pressed Ctrl-C.", "Start the same command again; all measurements are kept."),
    "141": ("stdout was closed, for example by `ladder explain \\| head`.", "Nothing."),
    "143": ("The process received SIGTERM, for example from a job scheduler.", "Start the same command again."),
}

KEYS = {
    # of the "ladder" section: type, meaning. `null` is among the types of what can be missing.
    "schema_version": ("integer", "The version of this section. A newer `ladder` reads older versions."),
    "rung": ("string", "The rung of the answer, such as `zero3`."),
    "engine": ("string", "The rung with its techniques, such as `zero3+liger`, and in brackets changed knobs."),
    "gradient_checkpointing": ("boolean", "Whether any layer is checkpointed."),
    "checkpoint_every": ("integer", "Every how many layers one is checkpointed: 1 for all, 2 for half, 0 for none."),
    "offload_activations": ("boolean", "Whether checkpointed activations wait in host memory."),
    "micro_batch": ("integer", "Sequences that one GPU processes at once."),
    "accumulation": ("integer", "Micro-steps per optimizer step."),
    "world_size": ("integer", "The number of ranks: one per GPU."),
    "num_nodes": ("integer", "The number of nodes, which share the ranks evenly."),
    "device": ("string", "`cuda` or `cpu`."),
    "gpu": ("string or null", "The name of the GPU; null on a CPU."),
    "tokens_per_second": (
        "number",
        "The speed over all ranks, as the proof measured it. `ladder verify` compares with it, unless there is a "
        "`tokens_per_second_range`.",
    ),
    "tokens_per_second_range": (
        "array or null",
        "The lowest and the highest speed to expect of a training, where the machine's speed varies; null where "
        "`tokens_per_second` should hold to 3 %. They are the extremes of the proof, of up to five parts of it, and of "
        "the answer's trial, and a fifth below and above the proof where [the CPU sets the "
        "pace](../how-to/own-script.md#when-the-speed-is-a-range). `ladder verify` compares with the lower end.",
    ),
    "step_seconds": ("number", "Seconds of one optimizer step with its accumulation."),
    "mfu": (
        "number or null",
        "Model FLOPs utilisation, from 0 to 1; null if the GPU's peak is not known.",
    ),
    "bound_tokens_per_second": (
        "number or null",
        "Tokens/s if a step were only the matrix products that training needs, at the rate measured in the proof; "
        "null where that was not measured. `ladder explain --bound` shows what takes the rest.",
    ),
    "joules_per_token": (
        "number or null",
        "The energy of all GPUs per token; null if no power was measured, or only in a trial that has far more of the "
        "optimizer than a training.",
    ),
    "memory_per_gpu": (
        "object",
        "Memory of the fullest rank in the proof; for your own script in its trial, if longest samples took more.",
    ),
    "memory_per_gpu.peak_allocated_gib": (
        "number",
        "The largest memory in torch's tensors, in GiB. This is what `ladder verify` holds a training to.",
    ),
    "memory_per_gpu.peak_reserved_gib": ("number", "The largest memory that torch's allocator held, in GiB."),
    "memory_per_gpu.peak_device_gib": (
        "number",
        "The largest memory of the whole process in GiB, with the CUDA context and NCCL, as NVML counts it. Where the "
        "GPU has room, a long training may hold 1 % more, as a cache of torch's allocator.",
    ),
    "memory_per_gpu.outside_torch_gib": (
        "number",
        "What the process held outside torch's allocator, in GiB: the CUDA context and NCCL. `ladder run` leaves room "
        "for it under a limit.",
    ),
    "memory_per_gpu.limit_gib": ("number", "The limit under which the answer was measured, in GiB."),
    "memory_per_gpu.limit_bytes": ("integer", "The same limit in bytes."),
    "memory_per_gpu.limited": (
        "boolean",
        "Whether the limit is below the whole GPU, because of `--gpu-memory`. If so, `ladder run` holds a training to "
        "it.",
    ),
    "headroom": ("number", "Memory left at the peak, as a fraction of the limit."),
    "host_memory_gib": (
        "number",
        "Host memory that all ranks held together at their peaks, in GiB. For your own script that includes loading "
        "its weights, but no mapped files that the kernel can drop.",
    ),
    "model": ("object", "The model that was tuned."),
    "model.name": ("string", "The name as you gave it."),
    "model.source": ("string", "Where its configuration came from, such as `hub`, `folder`, `file` or `bundled`."),
    "model.model_type": ("string", "The family as transformers names it."),
    "model.num_parameters": ("integer", "The number of its parameters."),
    "model.num_trained": (
        "integer",
        "The number of its parameters that are trained, or of those of its adapters.",
    ),
    "model.folder": ("string or null", "The model's folder on this machine; null if it has none."),
    "workload": ("object", "What is trained. A tune never changes it."),
    "workload.task": ("string", "The training task."),
    "workload.seq_len": ("integer", "Tokens per sequence."),
    "workload.global_batch_size": ("integer", "Sequences per optimizer step over all GPUs."),
    "workload.dtype": ("string", "The precision: `bf16`, `fp16` or `fp32`."),
    "workload.optimizer": ("string", "The optimizer that was measured; of a script see `script.optimizer`."),
    "workload.gradient_clipping": ("number", "The largest gradient norm; 0 means no clipping."),
    "proof": ("object", "The second run of the answer, in fresh processes."),
    "proof.simulated": ("boolean", "True if no trial ran. The key is missing in a real answer."),
    "proof.trial": ("string", "The number of the trial that was the proof."),
    "proof.optimizer_steps": ("integer", "Optimizer steps that were timed."),
    "proof.evaluation": ("boolean", "Whether an evaluation pass ran."),
    "proof.gathered_16bit_weights": ("boolean", "Whether the weights were gathered as for a save."),
    "proof.tokens_per_second": (
        "number",
        "The speed of the proof, as `tokens_per_second` above.",
    ),
    "warnings": ("array", "What you should know before you train with the answer."),
    "environment": ("object", "Environment variables of the trials, by name. Training needs them too."),
    "versions": ("object", "Versions of the packages that were measured, by name."),
    "run_dir": ("string", "The run folder, with its full path."),
    "digest": ("string", "A checksum of the file. `export`, `verify` and `run` refuse a file that was edited."),
}
PLAIN_KEYS = {
    "rung": ("string", "The rung."),
    "engine": ("string", "The rung with its techniques."),
    "checkpoint_every": ("integer", "As above."),
    "micro_batch": ("integer", "As above."),
    "accumulation": ("integer", "As above."),
    "tokens_per_second": ("number", "Of all GPUs together, in its proof."),
    "tokens_per_second_range": ("array or null", "As above."),
    "peak_device_gib": ("number", "As `memory_per_gpu.peak_device_gib`."),
}

SCRIPT_KEYS = {
    # of "script" in that section, which only the answer for a user's own script has
    "command": ("array", "The command behind `--`, one word each. `ladder run` and `ladder verify` start it."),
    "kind": ("string", "What it trains with: `trainer`, `accelerate` or `deepspeed`."),
    "sha256": ("string", "The checksum of its file. `ladder verify` warns if the file has changed."),
    "optimizer": ("string", "Its own optimizer. `ladder run` keeps one that has no counterpart in `workload`."),
    "mean_tokens": ("number", "Tokens per sample on average, without padding."),
    "samples_per_second": ("number", "The speed in samples over all ranks: `tokens_per_second` / `mean_tokens`."),
    "samples_per_second_range": ("array or null", "The same of both ends of `tokens_per_second_range`."),
    "promised_device_gib": (
        "number or null",
        "The most that a whole training holds on a GPU, in GiB: 1 % more than `memory_per_gpu.peak_device_gib`, "
        "because the cache of torch's allocator grows, and never more than the limit. Null on a CPU.",
    ),
    "padding": ("number or null", "Padding as a share of all tokens in the proof's batches, from 0 to 1."),
    "loader_share": ("number or null", "The share of the proof's time that the ranks waited for the data loader."),
    "generation_batch_size": (
        "integer",
        "Completions that the trainer generates at once on all ranks; only of a script with GRPO or RLOO.",
    ),
    "options": ("object", "The options of your own loop that set its `micro_batch` and `accumulation`."),
    "planned": (
        "object",
        "What your command makes by itself, as the look found it: `micro_batch`, `accumulation`, `optimizer_steps`, "
        "`schedule_steps`, `samples` and `trainable` parameters. `ladder run` compares. Missing at another global "
        "batch than your own.",
    ),
}
ADAPTER_KEYS = {
    # of "workload" in that section, which only the answer for a partly trained model has
    "lora": ("object", "The adapters, as the arguments of peft's `LoraConfig`."),
    "load_in": ("string", "How the frozen linear layers are held: `4bit` or `8bit`."),
    "freeze": ("array", "The modules that are not trained."),
}
OPEN_KEYS = ("environment", "versions")
"""Whose own keys differ from answer to answer."""
