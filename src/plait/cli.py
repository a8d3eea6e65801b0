"""The command line. Thin: every command calls one function and prints what it returns.

Nothing heavy is imported before a command runs, so that help and checks answer at once.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from plait.errors import ConfigError, PlaitError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.jobs.replay import ReplayResult
    from plait.jobs.replay_batch import BatchReplay

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


class PlaitGroup(TyperGroup):
    """Turns Plait's own errors into sentences and exit codes; any other is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params["debug"] or os.environ.get("PLAIT_DEBUG"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except PlaitError as error:
            _print_error(error)
            raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from None
        except KeyboardInterrupt:
            _print_lines(["Interrupted"])
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="plait",
    cls=PlaitGroup,
    help="Train small reasoning models by reinforcement learning from verifiable rewards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. --set train.num_steps=20. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help="Recipe that gives tasks and settings.")]


def _print_lines(lines: list[str]) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    for line in lines:
        # Values may hold brackets, and a long line must stay one for grep.
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _print_error(error: PlaitError) -> None:
    violations = error.violations if isinstance(error, ConfigError) else ()
    _print_lines([str(violation) for violation in violations] or [str(error)])


def _print(renderable: "RenderableType") -> None:
    from rich.console import Console

    # Lines of violations must stay whole for grep; only tables are fitted to the width.
    Console().print(renderable, crop=False)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import plait

        print(f"plait {plait.__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (or set PLAIT_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help='TOML file or packaged recipe; "starter" if left out.')] = None,
    set_: Set = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="NAME", help="With --resume: a setting that may differ. Repeatable."),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Folder for the results.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Short for --set seed=N.")] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Layout of every role over as many ranks, for example fsdp2tp2:sp.")
    ] = None,
) -> None:
    """Train by reinforcement learning, and show accuracy before and after."""
    overrides = [*(set_ or []), *([] if seed is None else [f"seed={seed}"])]
    if plan is not None:
        from plait.plan import plan_overrides

        overrides += plan_overrides(plan)
    if resume is not None and (recipe is not None or run_dir is not None or seed is not None):
        raise ConfigError(
            "--resume goes on with the run's own recipe, folder and seed. Leave RECIPE, --run-dir, --seed out"
        )
    if accept and resume is None:
        raise ConfigError("--accept names what may differ in a resumed run. Give the run by --resume, or leave it out")
    from plait.recipe import load_run_config, recipe_directory

    if resume is not None:
        from plait.jobs import train as job

        result = job.resume(resume, overrides, accepted=accept or ())
    else:
        name = recipe or "starter"
        config, directory = load_run_config(name, overrides), recipe_directory(name)
        # After the recipe was read, so that its mistakes are answered before torch is loaded.
        from plait.jobs import train as job

        result = job.train(config, run_dir=run_dir, recipe_dir=directory)
    _print(result.render())
    raise typer.Exit(result.exit_code)


@app.command("eval")
def evaluate(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL_OR_RUN]", help="Model folder or run folder.")] = None,
    recipe: Recipe = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Measure accuracy on held-out prompts, with its interval."""
    from plait.recipe import config_for_model

    config, directory = config_for_model(model, recipe, set_ or [])
    from plait.jobs.evaluate import evaluate as job

    result = job(config, model=model, recipe_dir=directory)
    if json_:
        _print_json(result.to_dict())
    else:
        _print(result.render())


@app.command()
def sample(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL_OR_RUN]", help="Model folder or run folder.")] = None,
    recipe: Recipe = None,
    set_: Set = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Held-out prompts.")] = 4,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Samples per prompt.")] = 1,
) -> None:
    """Show what a model answers, and how it is scored."""
    from plait.recipe import config_for_model

    config, directory = config_for_model(model, recipe, set_ or [])
    from plait.jobs import sample as job

    samples = job.sample(config, model=model, num_prompts=num_prompts, num_samples=num_samples, recipe_dir=directory)
    _print(job.render(samples))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    sample_id: Annotated[
        str | None, typer.Option("--sample", metavar="ID", help="Sample, by its id in samples.jsonl.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--batch", metavar="STEP", help="Update of this step, kept where it was not finite.")
    ] = None,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Make steps again where the weights or the batch are not kept.")
    ] = False,
    json_: Json = False,
) -> None:
    """Compute a stored sample or an update again: what moves the gap, or where values stop being finite."""

    def say(text: str) -> None:
        typer.echo(text, err=True)

    result: ReplayResult | BatchReplay
    if sample_id is not None and step is None:
        from plait.jobs.replay import replay as sample_job

        result = sample_job(run, sample_id, rerun=rerun, say=say)
    elif step is not None and sample_id is None:
        from plait.jobs.replay_batch import replay_batch as batch_job

        result = batch_job(run, step, rerun=rerun, say=say)
    else:
        raise ConfigError("replay makes one thing again: give --sample ID or --batch STEP, and not both")
    if json_:
        _print_json(result.to_dict())
    else:
        _print(result.render())


@app.command()
def sft(
    recipe: Annotated[
        str | None, typer.Argument(help='TOML file or packaged recipe; "starter_sft" if left out.')
    ] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the model.")] = None,
) -> None:
    """Warm a model up on worked solutions or your own rows."""
    from plait.recipe import load_sft_config, recipe_directory

    name = recipe or "starter_sft"
    config, directory = load_sft_config(name, set_ or []), recipe_directory(name)
    from plait.jobs import sft as job

    _print(job.sft(config, out_dir=out, recipe_dir=directory, progress=True).render())


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(help='TOML file or packaged recipe; "starter" if left out.')] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Check a recipe and show what it comes to, without loading a model."""
    from plait.jobs.check import check_recipe

    report = check_recipe(recipe or "starter", set_ or [])
    if json_:
        _print_json(report.to_dict())
    else:
        _print(report.render())
    if not report.is_valid:
        raise typer.Exit(EXIT_CONFIG)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="A named algorithm, or a .toml file of one.")] = None,
    json_: Json = False,
) -> None:
    """List the named algorithms by factors, or show one: stages, loops, what may split them, settings."""
    from plait.jobs import algorithms as job

    report = job.catalogue() if name is None else job.specification(name)
    if json_:
        _print_json(report.to_dict())
    else:
        _print(report.render())


@app.command()
def explain(
    model: Annotated[str, typer.Option("--model", help="Name of a shipped model, or a folder with a config.json.")],
    cluster: Annotated[str, typer.Option("--cluster", help='"8xH100", "4x8xH200" (nodes x devices), or a file.')],
    plan: Annotated[
        str | None, typer.Option("--plan", help='"fsdp8tp4:sp", "policy=fsdp8,generate=dp4tp2", or a .toml file.')
    ] = None,
    algorithm: Annotated[str, typer.Option("--algorithm", help="A named algorithm: plait algorithms.")] = "grpo",
    critic: Annotated[
        str | None, typer.Option("--critic", help="independent, shared_trunk, or the model of an independent one.")
    ] = None,
    reward_model: Annotated[str | None, typer.Option("--reward-model", help="A model that scores samples.")] = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Of one step.")] = 64,
    samples_per_prompt: Annotated[int, typer.Option("--samples-per-prompt")] = 8,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", help="On average.")] = None,
    response_tokens: Annotated[int | None, typer.Option("--response-tokens", help="On average.")] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option("--max-response-tokens", help="Where they are cut.")
    ] = None,
    response_cv: Annotated[float, typer.Option("--response-cv", help="Standard deviation over mean.")] = 0.8,
    microbatch_tokens: Annotated[int | None, typer.Option("--microbatch-tokens", help="Of one replica.")] = None,
    minibatch: Annotated[
        int | None, typer.Option("--minibatch", help="Sequences of one update; all if left out.")
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", help="Over the samples of a step.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")] = "bf16",
    state: Annotated[str | None, typer.Option("--state", help="Bytes per trained parameter, by name.")] = None,
    logits_chunk: Annotated[
        int | None, typer.Option("--logits-chunk", help="Tokens whose logits exist at once; 0: a microbatch's.")
    ] = None,
    verifier_s: Annotated[float, typer.Option("--verifier-s", help="Processor seconds of one check.")] = 0.01,
    verifier_longest_s: Annotated[float, typer.Option("--verifier-longest-s", help="Of the longest check.")] = 1.0,
    steps: Annotated[int | None, typer.Option("--steps", help="Explained together.")] = None,
    symbolic: Annotated[bool, typer.Option("--symbolic", help="Print the formulas.")] = False,
    json_: Json = False,
) -> None:
    """Show what every stage of a step costs under a plan, what bounds it, and whether it fits."""
    from plait.jobs.explain_request import Request

    request = Request(
        model, cluster, plan, algorithm, critic, reward_model, prompts, samples_per_prompt, prompt_tokens,
        response_tokens, max_response_tokens, response_cv, microbatch_tokens, minibatch, epochs, dtype, state,
        logits_chunk, verifier_s, verifier_longest_s, steps,
    )  # fmt: skip
    if symbolic:
        from plait.jobs.explain_symbolic import formulas

        shown = formulas(request)
        if json_:
            _print_json(shown.to_dict())
        else:
            _print(shown.render())
        return
    from plait.jobs.explain import explain as job

    report = job(request)
    if json_:
        _print_json(report.to_dict())
    else:
        _print(report.render())


@app.command()
def doctor(json_: Json = False) -> None:
    """Show what this machine has, what it measures and what it can run."""
    from plait.jobs.doctor import doctor as job

    report = job()
    if json_:
        _print_json(report.to_dict())
    else:
        _print(report.render())


@app.command()
def metrics(json_: Json = False) -> None:
    """Explain every metric that a run writes."""
    from plait.telemetry import metrics as catalogue

    if json_:
        _print_json(catalogue.to_dict())
    else:
        _print(catalogue.render())


@app.command()
def recipes(json_: Json = False) -> None:
    """List the recipes that ship with Plait."""
    from plait.recipe import packaged_recipes

    found = packaged_recipes()
    if json_:
        _print_json(found)
        return
    from rich.table import Table

    table = Table("recipe", "what it does")
    for name, comment in found.items():
        table.add_row(name, comment)
    _print(table)


def main() -> None:
    """Entry point of the `plait` script."""
    app()
