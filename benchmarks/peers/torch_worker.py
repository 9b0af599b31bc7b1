"""Worker for TRL and transformers on CPU torch: samples as TRL does without an inference server, and takes TRL's step."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import protocol
import torch
import transformers

State: dict[str, Any] = {}


def load(model_dir: str) -> dict[str, Any]:
    """Load the weights in float32 by ``from_pretrained``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # generate() would take it from here
    State["model"] = model
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return {"version": version, "parameters": sum(p.numel() for p in model.parameters())}


def trainer(learning_rate: float = 1e-5, new: int = 32, temperature: float = 1.0) -> Any:
    """A ``trl.GRPOTrainer`` around the loaded model: TRL's log-probs, loss and optimizer, not its data loop.

    TRL bakes the temperature into the model's head when the trainer is made, so another one needs a new trainer.
    """
    if "trainer" not in State or State["trainer"].temperature != temperature:
        import datasets
        import tokenizers
        import trl

        vocabulary = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(vocabulary),
            pad_token="<pad>",
            eos_token="<eos>",
            padding_side="left",
        )
        settings = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=new,
            learning_rate=learning_rate,
            beta=0.0,
            temperature=temperature,
            activation_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        State["trainer"] = trl.GRPOTrainer(
            model=State["model"],
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["<pad>"]}),
            processing_class=tokenizer,
        )
        State["trainer"].current_gradient_accumulation_steps = 1
    return State["trainer"]


def prepare_sampler(rows: int, prompt: int, new: int, samples: int) -> dict[str, Any]:
    return {"logprobs": "no (TRL recomputes them)"}


def generate(
    prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int, **options: Any
) -> Any:
    """``generate`` with the settings that TRL's trainer uses; nothing ends a row before ``new`` tokens."""
    torch.manual_seed(seed)
    tokens = torch.tensor(prompts).repeat_interleave(samples, dim=0)
    config = transformers.GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
        disable_compile=True,
        **options,
    )
    with torch.no_grad():
        return State["model"].generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )


def sample(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Sample ``samples`` completions per prompt; seconds of the whole call."""
    start = protocol.clock()
    tokens = generate(prompts, samples, new, temperature, seed)
    return {**protocol.since(start), "compiles": 0, "tokens": tokens[:, len(prompts[0]) :].tolist()}


def gap(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Difference between the log-probs sampled from and those that TRL's trainer computes for the same tokens."""
    output = generate(
        prompts, samples, new, temperature, seed, output_scores=True, return_dict_in_generate=True
    )
    completion = output.sequences[:, len(prompts[0]) :]
    rollout = torch.stack(
        [
            torch.log_softmax(scores, -1).gather(1, completion[:, column, None])[:, 0]
            for column, scores in enumerate(output.scores)
        ],
        dim=1,
    )
    difference = (log_probs(output.sequences, new, temperature) - rollout).abs()
    return {"max": difference.max().item(), "mean": difference.mean().item()}


def log_probs(tokens: torch.Tensor, new: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs ``[N, new]`` of the last ``new`` tokens, by TRL's trainer."""
    grpo = trainer(temperature=temperature)
    with torch.no_grad():
        return grpo._get_per_token_logps_and_entropies(State["model"], tokens, torch.ones_like(tokens), new)[
            0
        ]


def score(tokens: list[list[int]], prompt: int) -> dict[str, Any]:
    return {"log_probs": log_probs(torch.tensor(tokens), len(tokens[0]) - prompt).tolist()}


def prepare_training(learning_rate: float, prompt: int, new: int) -> dict[str, Any]:
    State.pop("trainer", None)
    trainer(learning_rate, new).create_optimizer()
    State["model"].train()
    return {}


def train_step(tokens: list[list[int]], prompt: int, advantages: list[float]) -> dict[str, Any]:
    """TRL's loss, backward, global-norm clip at 1 and AdamW step."""
    grpo, model = trainer(), State["model"]
    ids = torch.tensor(tokens)
    completion = ids[:, prompt:]
    batch = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(float(completion.numel())),
    }
    start = protocol.clock()
    loss = grpo.compute_loss(model, batch)
    grpo.accelerator.backward(loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    grpo.optimizer.step()
    grpo.optimizer.zero_grad()
    result = {"loss": loss.item(), "grad_norm": grad_norm.item()}
    return {**result, **protocol.since(start), "compiles": 0}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    protocol.serve(
        {
            "load": load,
            "prepare_sampler": prepare_sampler,
            "sample": sample,
            "gap": gap,
            "score": score,
            "prepare_training": prepare_training,
            "train_step": train_step,
        }
    )
