"""`lmcache-mp-safe`: the commands."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from lmcache_mp_safe.verify.traffic import WORDS

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Compared(enum.StrEnum):
    """Connectors that the demo can run beside ours."""

    STOCK = "stock"


@app.callback()
def main() -> None:
    """KV cache for vLLM in an LMCache server, without changing what the model says."""


@app.command()
def demo(
    sessions: Annotated[int, typer.Option(min=1, help="Conversations that share a system prompt.")] = 3,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each conversation.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")] = 16,
    compare: Annotated[
        Compared | None, typer.Option(help="Run another connector on the same requests, and report what it does.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Real engines, a real LMCache server, a tiny hybrid model: every external hit against recomputing.

    Exit status 1 if an answer diverged, if an arm had no external hit, or if a pin or a lock was left over.
    """
    from lmcache_mp_safe.cli.demo import DemoOptions, run_demo

    raise typer.Exit(run_demo(DemoOptions(sessions, turns, max_tokens, compare is Compared.STOCK, json_file)))


@app.command()
def bench(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Which; all of them by default.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say which there are and whether they can run here.")] = False,
    quick: Annotated[bool, typer.Option(help="Tiny sizes: does it work, not how fast is it.")] = False,
    strict: Annotated[bool, typer.Option(help="A missed threshold is a failure.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write each result as JSON, Markdown and SVG here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
) -> None:
    """Measure on this machine: scheduler hooks and wire bytes against the stock connector, CPU copies, hits.

    Exit status 1 if a case failed, or with --strict missed a threshold; 2 for a case that there is not. A case that
    cannot run here says why and is no failure.
    """
    from lmcache_mp_safe.cli.bench import BenchOptions, run_bench

    raise typer.Exit(run_bench(BenchOptions(keys or [], listed, quick, strict, out, json_file)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    server_url: Annotated[
        str | None, typer.Option(help="The LMCache server; by default the one of the engine's settings.")
    ] = None,
    server_http_url: Annotated[
        str | None, typer.Option(help="Its HTTP interface; by default port 8080 of the same host.")
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that looking at vLLM may take.")] = 300,
    step: Annotated[float, typer.Option(min=0.1, help="Seconds that each step on the server may take.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file; `-` prints it instead of the page.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 on warnings too.")] = False,
) -> None:
    """What is installed, configured and running, and what that leads to. One page, no weights loaded.

    Give the model and all other arguments of `vllm serve` behind `--`:

    lmcache-mp-safe doctor -- MODEL --kv-transfer-config '{...}'

    Exit status 0 if there is no problem, 1 if there is one, 2 if the arguments are wrong.
    """
    from lmcache_mp_safe.cli.doctor import DoctorOptions, run_doctor, without_command
    from lmcache_mp_safe.doctor.gather import Options

    look = Options(without_command(context.args), server_url, server_http_url, deadline, step)
    raise typer.Exit(run_doctor(DoctorOptions(look, json_file, strict)))


@app.command()
def verify(
    url: Annotated[str | None, typer.Option(help="The server under test: vLLM with the connector.")] = None,
    baseline_url: Annotated[
        str | None, typer.Option(help="The same model without the connector; the same server if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name; the first of /v1/models if left out.")] = None,
    baseline_model: Annotated[str | None, typer.Option(help="Its name on the baseline, where it differs.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts; each is asked four times.")] = 60,
    minutes: Annotated[float | None, typer.Option(min=0, help="Go on for so long, instead of --requests.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")] = 64,
    near_tie: Annotated[float, typer.Option(min=0, help="Nats up to which a difference is a near-tie.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the generated sessions.")] = 0,
    words: Annotated[int, typer.Option(min=1, help="About how many the longest generated prompt has.")] = WORDS,
    chats: Annotated[Path | None, typer.Option(help="JSONL of chats to replay instead.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each request.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Show that one wrong answer is noticed.")] = False,
) -> None:
    """Ask live servers, with the connector and without, and compare what they say. API key: OPENAI_API_KEY.

    Exit status 0: clean. 1: corrupt, or the self-test failed. 2: wrong usage, or a server gave no answer. 3: suspicious
    or undecided.
    """
    from lmcache_mp_safe.cli.verify import VerifyOptions, run_verify
    from lmcache_mp_safe.verify.run import Settings

    settings = Settings(None if minutes is not None else requests, minutes, concurrency, max_tokens, near_tie)
    raise typer.Exit(
        run_verify(
            VerifyOptions(
                url=url,
                baseline_url=baseline_url,
                model=model,
                baseline_model=baseline_model,
                settings=settings,
                seed=seed,
                words=words,
                chats=chats,
                timeout_s=timeout,
                json_file=json_file,
                html_file=html_file,
                self_test=self_test,
            )
        )
    )


@app.command()
def replay(trace: Annotated[Path, typer.Argument(help="A trace that a failing seed of the simulator left.")]) -> None:
    """Run a trace of the simulator again. Exit status 1 if an invariant does not hold, 2 if it is no trace."""
    from lmcache_mp_safe.cli.replay import run_replay

    raise typer.Exit(run_replay(trace))


if __name__ == "__main__":
    app()
