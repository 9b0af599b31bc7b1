"""Qwen3-8B learns competition mathematics (MATH) with DAPO on a slice of 32 TPU chips (v5p-64).

    hf download DigitalLearningGmbH/MATH-lighteval --repo-type dataset --local-dir data/math
    python -m jaxrl.launch --config=configs/grpo_qwen3_8b_math.py --run_dir=/shared/runs/math

Parameters and optimizer state are split over ``fsdp`` and ``tensor``, the batch over ``fsdp``; with other numbers of
chips, keep rows per micro-batch a multiple of data x fsdp. Shapes and options are checked by the "debug" variant (two
steps of a tiny random model on sums, anywhere, without any download); the full size has not been run here. Variants:
"" and "debug".
"""

from ml_collections import ConfigDict

MODEL = "Qwen/Qwen3-8B"
#: Parquet files with the fields "problem" and "solution"; a solution holds its answer in \\boxed{}.
TRAIN = "data/math/data/train-00000-of-00001.parquet"
TEST = "data/math/data/test-00000-of-00001.parquet"
TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "debug"):
        raise ValueError(f"variant {variant!r} is unknown; use '' or 'debug'")
    config = ConfigDict(
        dict(
            system="grpo",
            model=dict(source=MODEL, dtype="bfloat16", param_dtype="float32", remat="block", scan_layers=True),
            data=dict(
                kind="parquet",
                path=TRAIN,
                heldout_path=TEST,
                prompt_field="problem",
                answer_field="solution",
                template=TEMPLATE,
                seed=0,
            ),
            prompt=dict(max_prompt_len=512),
            rewards=(dict(name="math_verify", kwargs=dict(require_boxed=True)),),
            reward_workers=16,
            rollout=dict(
                prompts=64,
                group_size=16,
                max_tokens=4096,
                temperature=1.0,
                slots=512,
                decode_chunk=64,
                dynamic_sampling=True,
                max_batches=3,
            ),
            # 1024 rows, four optimizer steps of 256 rows, 32 rows in memory at once (4 per batch shard).
            update=dict(minibatches=4, micro_batches=8, chunk_tokens=8192),
            algorithm=dict(name="dapo", mismatch_level="token"),
            optimizer=dict(name="adamw", learning_rate=1e-6, warmup_steps=10, clip_norm=1.0, weight_decay=0.1),
            eval=dict(prompts=512, samples=0, greedy=True),
            run=dict(total_steps=400, eval_every=20, checkpoint_every=20, keep_best="eval/accuracy_greedy"),
            mesh=dict(data=1, fsdp=-1, tensor=4),
        )
    )
    if variant == "debug":
        shape = dict(d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, qk_norm=True)
        config.model = dict(
            architecture=dict(vocab_size=24, max_position=64, tie_embeddings=False, **shape),
            tokenizer="chars:0123456789+-= \\boxed{}",
            remat="block",
            scan_layers=True,
        )
        config.data = dict(kind="reasoning_gym", task="chain_sum", template="{expression} = ", size=40, heldout=4)
        config.data.params = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
        config.prompt.max_prompt_len = 16
        config.reward_workers = 1
        config.rollout.update(prompts=4, group_size=4, max_tokens=4, slots=8, max_batches=2)
        config["update"].micro_batches = 1
        config.eval.prompts = 4
        config.run.update(total_steps=2, eval_every=2, checkpoint_every=2)
        config.mesh = dict(data=-1, fsdp=1, tensor=1)
    return config
