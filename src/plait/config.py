"""What a run is made of: typed, strict, frozen settings. A default lives on its field and nowhere else.

Units are in the names: prompts, samples (= completions = sequences), tokens, updates, steps.
A *step* is one round generate -> score -> advantage -> update; an *update* is one optimiser step.
Rules that span sections are in `plait.rules`; reading recipes is in `plait.recipe`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plait.algorithm_config import AlgorithmConfig
from plait.parallel.degrees import ContextKind, Offload, PipelineSchedule, Recompute
from plait.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


class ModelConfig(Section):
    path: str = "starter"
    """A transformers folder, or "starter" for the model that ships with the package."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the copy that computes; fp32 masters are always kept. "auto": bfloat16 where the hardware has it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: NonNegativeInt = 0
    """CPU threads of torch; 0 takes all cores. Bit-identity is promised for a fixed number."""


class ReasoningGymTask(Section):
    source: Literal["reasoning_gym"]
    task: str
    """Name of a reasoning-gym data set."""
    weight: PositiveFloat = 1.0
    """Share of the prompts of a step, relative to the other tasks."""
    params: dict[str, Any] = {}
    """Keyword arguments of that data set (not `seed` and `size`, which the run sets)."""
    name: str = ""
    """Name in metrics and samples; the task's name when empty."""


class RowsTask(Section):
    source: Literal["rows", "preferences"]
    """"preferences": every row also has two answers to its prompt, `chosen` and `rejected`, and needs an `answer` only
    where the run evaluates."""
    path: str
    """JSONL or Parquet file; relative paths are relative to the recipe's folder."""
    eval_path: str = ""
    """File with the held-out rows; when empty, `holdout_share` of `path` is held out."""
    holdout_share: Share = 0.1
    verifier: str = "answer"
    """Built-in name ("answer", "exact", "numeric", "format") or "module:function"; a row's own field wins."""
    weight: PositiveFloat = 1.0
    name: str = ""
    """Name in metrics and samples; the file's stem when empty."""


TaskConfig = Annotated[ReasoningGymTask | RowsTask, Field(discriminator="source")]


class BatchConfig(Section):
    num_prompts_per_step: PositiveInt
    num_samples_per_prompt: PositiveInt
    num_sequences_per_minibatch: NonNegativeInt = 0
    """Samples per optimiser update; 0 takes the whole step in one update."""
    num_epochs_per_step: PositiveInt = 1
    """Passes over the samples of a step."""
    num_tokens_per_microbatch: PositiveInt = 8192
    """Upper bound of prompt and response tokens in one forward and backward pass."""


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    min_p: Share = 0.0
    """Keeps tokens with at least min_p times the probability of the likeliest one."""


class RolloutConfig(Section):
    max_prompt_tokens: PositiveInt = 512
    overlong_prompts: Literal["drop", "stop"] = "drop"
    """A prompt over the limit is dropped and counted, or stops the run; it is never cut."""
    max_completion_tokens: PositiveInt = 512
    num_slots: PositiveInt = 128
    """Samples that the engine decodes at the same time."""
    sampling: SamplingConfig = SamplingConfig()
    record_experts: bool = False
    """Keep with each sample which experts a mixture of experts chose, token by token; 2 bytes per token, layer and
    chosen expert, for every place of the slots."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens (each one token of the tokenizer) that end a completion, beside the model's end tokens."""


class OptimizerConfig(Section):
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """"muon": Muon for the hidden matrices, AdamW for embeddings, head, norms and biases."""
    learning_rate: PositiveFloat = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates; SGD and Muon take the first as momentum."""
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over all updates of the run."""
    warmup_share: Share = 0.0
    """Share of the run's updates in which the rate rises linearly from 0."""
    final_share: Share = 0.0
    """Learning rate at the end, as a share of the peak, for "linear" and "cosine"."""

    def num_warmup_updates(self, num_updates: int) -> int:
        """Updates of a run of num_updates in which the rate rises: their share, rounded up."""
        # 0.07 * 100 is 7.000000000000001, which must not become 8.
        return math.ceil(round(self.warmup_share * num_updates, 9))


class TrainConfig(Section):
    num_steps: PositiveInt
    wall_clock_limit_s: PositiveFloat | None = None
    """Stop in good order (checkpoint, evaluation, export) before this many seconds."""
    max_nonfinite_updates: PositiveInt = 3
    """Updates in a row with NaN or infinite gradients, none of them applied, before the run stops."""


class EvaluationConfig(Section):
    num_prompts: PositiveInt = 64
    """Held-out prompts per task mix; row tasks use at most as many as they have."""
    num_samples_per_prompt: PositiveInt = 4
    at_start: bool = True
    at_end: bool = True
    every_steps: NonNegativeInt = 0
    """0 evaluates only at the start and at the end."""
    max_completion_tokens: NonNegativeInt = 0
    """0 takes the rollout's limit."""
    sampling: SamplingConfig = SamplingConfig()
    seed: NonNegativeInt = 0
    """Chooses the held-out instances; independent of the run's seed so that runs can be compared."""

    @property
    def takes_place(self) -> bool:
        """Whether a run evaluates at all."""
        return self.at_start or self.at_end or self.every_steps > 0


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 20
    """0 writes one only at the end or when the run is stopped in good order."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; the best by evaluation is kept beside them."""


class LoggingConfig(Section):
    tensorboard: bool = False
    samples_per_step: NonNegativeInt = 8
    """Samples written to samples.jsonl at each step."""


class ControlConfig(Section):
    rewards: Literal["verifier", "random", "constant"] = "verifier"
    """"random" (a fair coin) and "constant" are controls: accuracy must not rise under them."""


class VerifiersConfig(Section):
    """Where verifiers run. A verifier must judge each sample by itself: how samples are batched is not fixed."""

    num_workers: NonNegativeInt = 1
    """Processes that score beside generation; 0 scores in the training process, where no limit is enforced."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit per sample; a sample over it counts as failed."""
    memory_bytes: PositiveInt = 2 * 2**30
    """Limit of the address space of a worker, Python and the verifier's imports included."""
    weight: NonNegativeFloat = 1.0
    """Factor of the verifier's score in the reward, beside the weights of [[reward_models]]."""
    max_failed_share: Share = 0.5
    """Share of failed verdicts of one verifier, over its last samples, above which the run stops; 1 never stops it."""


class RewardModelConfig(Section):
    """A trained reward model: one number per prompt and completion."""

    path: str
    """A transformers folder of a sequence classifier with one label, with a tokenizer like the policy's."""
    weight: float = 1.0
    """Factor of its score in the reward."""
    name: str = ""
    """Name in metrics; the folder's name when empty."""

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name


class LayoutConfig(Section):
    degrees: str = ""
    """Short spelling of the degrees, such as "fsdp4tp2"; empty is one device."""
    recompute: Recompute = "none"
    """"full" keeps only each layer's input and computes its activations again in the backward pass; "selective" keeps
    matrix products and attention outputs."""
    zero: Literal[0, 1, 2, 3] = 3
    """Sharded over dp_shard x cp: 1 the optimiser's state, 2 also gradients, 3 also parameters."""
    sp: bool = False
    pp_schedule: PipelineSchedule = "1f1b"
    num_virtual: PositiveInt | None = None
    cp_kind: ContextKind = "ring"
    offload: Offload = "none"


class PlanConfig(Section):
    """The parallel plan as written in a recipe; `plait.plan` turns it into a checked `Plan`."""

    pools: dict[str, PositiveInt] = {"main": 1}
    place: dict[str, str] = {}
    layout: dict[str, str | LayoutConfig] = {}
    """Stage or role -> layout: one word such as "fsdp2tp2:sp:full", or a table. Without one of its own a role has the
    policy's."""
    schedule: Literal["sync"] = "sync"
    runtime: Literal["auto", "inline", "ray"] = "auto"
    """Where ranks run: "inline" in this process, "ray" as actors; "auto" is inline for one device."""
    wait_limit_s: PositiveFloat = 1800.0
    """Longest that any rank may take for one stage, and any collective for its peers; then all are ended."""


class RunConfig(Section):
    """Everything that decides a run. Written, resolved, as config.json beside its results."""

    name: str
    seed: NonNegativeInt = 1
    model: ModelConfig = ModelConfig()
    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    control: ControlConfig = ControlConfig()
    verifiers: VerifiersConfig = VerifiersConfig()
    reward_models: tuple[RewardModelConfig, ...] = ()
    plan: PlanConfig = PlanConfig()


class WorkedSolutionsData(Section):
    """Rows made from the tasks' own worked solutions; no instance of the evaluation is among them."""

    source: Literal["worked_solutions"]
    reasoning_share: Share = 0.5
    """Share of rows that show their steps; the others give the answer at once."""


class SupervisedRowsData(Section):
    """A user's rows: `prompt` (text or messages) and `completion`."""

    source: Literal["rows"]
    path: str


class SftTrainConfig(Section):
    num_updates: PositiveInt
    num_sequences_per_update: PositiveInt
    num_tokens_per_microbatch: PositiveInt = 8192


class SftModelConfig(ModelConfig):
    from_scratch: bool = False
    """Take only the architecture and the tokenizer from `path`, and start from random weights."""


class SftConfig(Section):
    """Supervised warm-up: next-token loss on the completions only."""

    name: str
    seed: NonNegativeInt = 1
    model: SftModelConfig = SftModelConfig()
    tasks: tuple[ReasoningGymTask, ...] = ()
    data: Annotated[WorkedSolutionsData | SupervisedRowsData, Field(discriminator="source")]
    train: SftTrainConfig
    max_sequence_tokens: PositiveInt = 1024
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
