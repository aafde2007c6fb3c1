"""The command line `dflash-native`: doctor, demo, generate and verify.

Only declarations are here: MLX and the models are imported by the command that needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="dflash-native",
    help="Block speculative decoding on hybrid models, with rollback that is exact to the bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DtypeName = Literal["float32", "bfloat16", "float16", "stored"]

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Inputs of a verify, at most the draft's own block.",
        show_default="chosen each round by what it costs here and what was accepted",
    ),
]
_Exact = Annotated[
    bool,
    typer.Option(
        "--exact/--no-exact",
        help="Decode by operations that give a block the bits of single steps, or by MLX's own.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"dflash-native {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command("doctor")
def doctor_command(
    json: _Json = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what a round costs by width, and keep it.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --measure: the target; without it the built-in pair.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="With --measure: the draft, as for generate.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="With --measure: tokens before the round; repeatable.", show_default="64"
        ),
    ] = None,
) -> None:
    """Say what runs here and on which kernels, and test every operation.

    Exits with 1 if a test fails.
    """
    from .console import guard

    with guard():
        from .console import OptionError
        from .doctor import run, run_measurement

        for name, value in (("model", model), ("draft", draft), ("context", context)):
            if value and not measure:
                raise OptionError(f"expected --{name} only with --measure")
        if measure:
            run_measurement(as_json=json, model=model, draft=draft, contexts=context or [64])
        else:
            run(as_json=json)


@app.command("demo")
def demo_command(
    json: _Json = False,
    prompts: Annotated[int, typer.Option(help="How many of the shipped prompts to run.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each.")] = 96,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs of a verify, at most the draft's own block.",
            show_default="the fastest on this backend, as measured",
        ),
    ] = None,
    dtype: Annotated[
        DtypeName, typer.Option(help="Of weights and activations; stored: 8-bit and bfloat16.")
    ] = "float32",
    exact: _Exact = True,
) -> None:
    """Show the built-in pair at work, then compare DFlash with plain decoding.

    Needs no network. Accepted drafts are underlined, or in brackets where there is no terminal.
    """
    from .console import guard

    with guard():
        from .demo import run

        run(
            as_json=json,
            prompts=prompts,
            max_tokens=max_tokens,
            block_size=block_size,
            dtype=dtype,
            exact=exact,
        )


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from standard input.")],
    model: Annotated[
        str | None,
        typer.Option(help="The target: a folder or a hub id. Without it, the built-in pair."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="A DFlash draft or a small model of the same vocabulary: a folder or a hub id. "
            "Or lookup: what followed earlier in the text. Or combined:DRAFT: lookup where the "
            "text repeats itself, that draft elsewhere. Without it, plain decoding. With the "
            "built-in pair: lookup, or combined for its own draft beside the lookup."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate; -1: no limit.")] = 256,
    block_size: _BlockSize = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")] = False,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most probable token; above it, tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the tokens that together reach it.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens of this share of the best one's probability.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the best tokens; 0: all.")] = 0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides the logits of the last 20 tokens.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from the logits of the last 20 tokens.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time a token stands there.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed draws the same text.", show_default="random")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the generation; repeatable.")
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="Of weights and activations.",
            show_default="stored; float32 for the built-in pair",
        ),
    ] = None,
    exact: _Exact = True,
    json: _Json = False,
) -> None:
    """Continue a prompt: the text on standard output, statistics on standard error.

    Ctrl-C keeps what was generated and exits with 130.
    """
    from .console import guard

    with guard():
        from .generate import run

        run(
            prompt=prompt,
            model=model,
            draft=draft,
            max_tokens=max_tokens,
            block_size=block_size,
            raw=raw,
            sampling={
                "temperature": temperature,
                "top_p": top_p,
                "min_p": min_p,
                "top_k": top_k,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "seed": seed,
            },
            stop=stop or [],
            dtype=dtype,
            exact=exact,
            as_json=json,
        )


@app.command("verify")
def verify_command(
    model: Annotated[
        str | None,
        typer.Option(help="The target. Without it, the built-in pair in fp32, bf16, 8 and 4 bit."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Its draft, as for generate. Without it, drafts are made from the plain answer."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A text: one prompt, or several, each after a line `=== name (kind)`.",
            exists=True,
            dir_okay=False,
            show_default="the shipped prompts",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Most prompts to run.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each.")] = 128,
    exact: _Exact = True,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock/--no-stock",
            help="Run mlx-lm too. On a CPU its quantised products are slow.",
        ),
    ] = True,
    json: _Json = False,
) -> None:
    """Compare plain decoding, speculative decoding and stock mlx-lm, token by token.

    Exits with 1 if drafts changed a token.
    """
    from .console import guard

    with guard():
        from .verify import run

        run(
            model=model,
            draft=draft,
            prompt_file=prompt_file,
            prompts=prompts,
            max_tokens=max_tokens,
            exact=exact,
            stock=stock,
            as_json=json,
        )


@app.command("serve")
def serve_command(
    model: Annotated[
        str | None,
        typer.Option(help="The target: a folder or a hub id. Without it, the built-in pair."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Its draft, as for generate. Without it, plain decoding.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The model's id for clients.", show_default="the folder's name"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Clients must send one of these; repeatable.", envvar="DFLASH_NATIVE_API_KEY"
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which clients reach it, beside localhost and addresses; repeatable."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose web pages may call, * for all; repeatable."),
    ] = None,
    parallel: Annotated[int, typer.Option(help="Requests that are worked on in turn.")] = 4,
    queue: Annotated[int, typer.Option(help="Requests that may wait; then 503.")] = 32,
    max_context: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer.", show_default="the model's own"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens a request may ask for, and its default.",
            show_default="what the context allows",
        ),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Most bytes of a request.")] = 8 << 20,
    timeout: Annotated[float, typer.Option(help="Most seconds of a request.")] = 600.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that open requests get when the server is stopped.")
    ] = 30.0,
    temperature: Annotated[float, typer.Option(help="Of requests that name none.")] = 0.0,
    prefill_step_size: Annotated[
        int, typer.Option(help="Most prompt tokens read before the next request has its turn.")
    ] = 512,
    prefix_cache_bytes: Annotated[
        int, typer.Option(help="Memory for prompts that were read before; 0 keeps none.")
    ] = 1 << 30,
    prefix_cache_dir: Annotated[
        Path | None, typer.Option(help="A folder that keeps them beyond this run.")
    ] = None,
    prefix_cache_disk_bytes: Annotated[
        int | None, typer.Option(help="Most bytes in it.", show_default="no limit")
    ] = None,
    block_size: _BlockSize = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="Of weights and activations.",
            show_default="stored; float32 for the built-in pair",
        ),
    ] = None,
    exact: _Exact = True,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log in JSON lines.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, with a status page at /.

    Ctrl-C or SIGTERM ends it once the open requests are answered.
    """
    from .console import guard

    with guard():
        from .serve import run

        run(
            model=model,
            draft=draft,
            name=name,
            host=host,
            port=port,
            api_keys=tuple(api_key or ()),
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=tuple(cors_origin or ()),
            parallel=parallel,
            queue=queue,
            max_context=max_context,
            max_tokens=max_tokens,
            max_body_bytes=max_body_bytes,
            timeout=timeout,
            drain=drain,
            temperature=temperature,
            prefill_step_size=prefill_step_size,
            block_size=block_size,
            dtype=dtype,
            exact=exact,
            log_json=log_json,
            cache={
                "budget_bytes": prefix_cache_bytes,
                "directory": prefix_cache_dir,
                "disk_budget_bytes": prefix_cache_disk_bytes,
            },
        )
