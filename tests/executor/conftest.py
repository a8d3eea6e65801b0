"""A task of one token, run through the real stages in this process: which half of the vocabulary is rewarded."""

import json
from types import SimpleNamespace

import pytest

REWARDED_BELOW = 24
"""Ids of the 48 of the random model that earn 1; before training about half of the samples do."""

BASE = {
    "name": "bandit",
    "model": {"compute_dtype": "float32"},
    "tasks": [{"source": "reasoning_gym", "task": "chain_sum"}],
    "batch": {"num_prompts_per_step": 8, "num_samples_per_prompt": 8, "num_tokens_per_microbatch": 256},
    "rollout": {"max_prompt_tokens": 4, "max_completion_tokens": 1, "num_slots": 64},
    "optimizer": {"learning_rate": 1e-2},
    "train": {"num_steps": 12},
}


class _Scorer:
    """Rewards by `reward(sample)`; what Scoring asks for, without a process."""

    def __init__(self, reward):
        self._reward, self._submitted = reward, []

    def submit(self, samples):
        self._submitted += samples

    def collect(self):
        from plait.batch import Verdict

        made, self._submitted = self._submitted, []
        return {sample.id: Verdict("scored", self._reward(sample)) for sample in made}

    def slowest(self, num_samples=5):
        return []


class _Prompts:
    """Prompts of two tokens out of the run's cursor."""

    def __init__(self, *, gives_pairs=False):
        self._gives_pairs = gives_pairs

    def prompt(self, number):
        from plait.batch import Prompt

        # Rows of preferences have an answer of the rewarded half and one of the other; what samples reads neither.
        better, worse = number % 22 + 2, number % 24 + REWARDED_BELOW
        preference = (str(better), str(worse)) if self._gives_pairs else None
        return Prompt(f"p{number}", "bandit", (), None, "bandit", preference=preference)

    def encode_prompt(self, prompt):
        number = int(prompt.id[1:])
        return 3 + number % 5, 30 + number % 7

    def encode_answer(self, text):
        return (int(text),)


def rewarded_half(sample):
    """1 for a first token in the rewarded half."""
    return float(sample.response_ids_R[0] < REWARDED_BELOW)


@pytest.fixture
def bandit(make_model, plain_tokenizer):
    """bandit(algorithm={...}, batch={...}) -> the states of all steps, and the parts that made them."""
    from plait.algorithms.settings import step_graph
    from plait.config import RunConfig
    from plait.data.stream import PromptStream
    from plait.executor.inline import InlineExecutor, Parts
    from plait.executor.workers import LocalWorkers, Roles
    from plait.models.value_head import ValueHead
    from plait.plan import Plan
    from plait.rewards.breaker import CircuitBreaker
    from plait.roles.critic import Critic
    from plait.roles.policy import Policy
    from plait.roles.reference import Reference
    from plait.rollout.engine import Engine
    from plait.rules import check_config
    from plait.schedules.sync import sync
    from plait.stages.generate import generate
    from plait.telemetry.trace import Trace

    def run(*, reward=rewarded_half, reward_models=(), rules=True, **sections):
        merged = {**BASE, **{k: {**BASE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
        config = RunConfig.model_validate_json(json.dumps(merged))
        if rules:
            check_config(config)
        plan, model, critic = Plan.from_config(config), make_model(), config.algorithm.critic
        prompts = _Prompts(gives_pairs=not config.algorithm.samples_answers)
        rate = critic.learning_rate or config.optimizer.learning_rate
        roles = Roles(
            policy=Policy(
                model, config.optimizer, value_head=ValueHead(32, "cpu") if critic.kind == "shared_trunk" else None
            ),
            reference=Reference(make_model()) if config.algorithm.needs_reference else None,
            engine=Engine(model, end_token_ids=(1,), num_slots=64, max_sequence_tokens=plan.engine.max_sequence_tokens),
            critic=Critic(make_model(), config.optimizer.model_copy(update={"learning_rate": rate}))
            if critic.kind == "independent"
            else None,
            reward_models=reward_models,
        )
        parts = Parts(
            workers=LocalWorkers(roles, config, plan),
            tokenizer=plain_tokenizer,
            scorer=_Scorer(reward),
            breaker=CircuitBreaker(1.0),
            evaluation_scorer=_Scorer(reward),
            stream=PromptStream(prompts, prompts, max_prompt_tokens=4, max_answer_tokens=1, stop_on_overlong=True),
            trace=Trace(),
        )
        states = []
        executor = InlineExecutor(
            config, plan, step_graph(config), parts, should_stop=lambda: False, on_step_end=states.append
        )
        sync(executor, first_step=1, last_step=config.train.num_steps)

        def sampled_reward(sampler):
            """Mean reward of 256 samples of a model."""
            engine = Engine(sampler, end_token_ids=(1,), num_slots=64, max_sequence_tokens=5)
            drawn = PromptStream(prompts, prompts, max_prompt_tokens=4, max_answer_tokens=1, stop_on_overlong=True)
            settings = {"max_completion_tokens": 1, "sampling": config.rollout.sampling, "seed_key": (9,)}
            groups = generate(engine, plain_tokenizer, drawn.draw(8), num_samples=32, **settings)
            return sum(reward(s) for group in groups for s in group.samples) / 256

        return SimpleNamespace(
            states=states,
            parts=parts,
            roles=roles,
            config=config,
            executor=executor,
            start=make_model(),
            sampled_reward=sampled_reward,
        )

    return run
