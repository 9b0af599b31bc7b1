"""Qwen2.5-0.5B-Instruct learns grade-school mathematics (GSM8K) by GRPO on one accelerator.

    hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
    python -m jaxrl.launch --config=configs/grpo_qwen2_5_0_5b_gsm8k.py --run_dir=runs/gsm8k

Weights and tokenizer come from the hub at the first start. Variants: "" (with several accelerators the batch is
split over them), "lora" (adapters on all layers) and "debug" (two steps of a tiny random model on sums, anywhere,
without any download).
"""

from ml_collections import ConfigDict

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
#: Parquet files with the fields "question" and "answer"; an answer ends in "#### 42".
TRAIN = "data/gsm8k/main/train-00000-of-00001.parquet"
TEST = "data/gsm8k/main/test-00000-of-00001.parquet"
TEMPLATE = "{question}\nThink step by step, then write the final number after ####."


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "lora", "debug"):
        raise ValueError(f"variant {variant!r} is unknown; use '', 'lora' or 'debug'")
    config = ConfigDict(
        dict(
            system="grpo",
            model=dict(source=MODEL, dtype="bfloat16", param_dtype="float32", remat="block"),
            data=dict(
                kind="parquet",
                path=TRAIN,
                heldout_path=TEST,
                prompt_field="question",
                answer_field="answer",
                template=TEMPLATE,
                seed=0,
            ),
            prompt=dict(max_prompt_len=256),
            rewards=(dict(name="gsm8k", kwargs=dict(mode="flexible")),),
            rollout=dict(prompts=32, group_size=8, max_tokens=400, temperature=1.0, slots=256),
            # Two optimizer steps per batch: the second is off-policy, which is what the clip range is for.
            update=dict(minibatches=2, micro_batches=4, chunk_tokens=2048),
            algorithm=dict(name="grpo", clip_high=0.28, mismatch_level="token"),
            optimizer=dict(name="adamw", learning_rate=1e-6, warmup_steps=10, clip_norm=1.0),
            eval=dict(prompts=256, samples=0, greedy=True),
            run=dict(total_steps=300, eval_every=25, checkpoint_every=50, keep_best="eval/accuracy_greedy"),
            mesh=dict(data=-1, fsdp=1, tensor=1),
        )
    )
    if variant == "lora":
        config.model.lora = dict(rank=32, alpha=64.0)
        config.trainable = "lora"
        config.optimizer.learning_rate = 2e-5
    if variant == "debug":
        shape = dict(d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32, qkv_bias=True)
        config.model = dict(architecture=dict(vocab_size=16, max_position=64, **shape), tokenizer="chars:0123456789+-= ")
        config.data = dict(kind="reasoning_gym", task="chain_sum", template="{expression} = ", size=40, heldout=4)
        config.data.params = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
        config.prompt.max_prompt_len = 16
        config.rollout.update(prompts=4, group_size=2, max_tokens=4, slots=8)
        config["update"].micro_batches = 2
        config.eval.prompts = 4
        config.run.update(total_steps=2, eval_every=2, checkpoint_every=2)
    return config
