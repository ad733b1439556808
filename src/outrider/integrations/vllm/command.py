"""`outrider serve --backend vllm`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from outrider.errors import ConfigError
from outrider.integrations.vllm.mapping import Wish, command, read_table, refuse, shown
from outrider.server_config import ServerConfig


def serve_vllm(
    config: ServerConfig,
    options: Mapping[str, Any],
    given: Collection[str],
    template: Path | None,
) -> int:
    """Serves until a signal to stop and returns the exit code.

    `options` are fields of EngineConfig and VllmConfig, `given` the names of those that the user
    wrote, `template` is the file of the chat template.
    """
    if find_spec("httpx") is None or find_spec("uvicorn") is None:
        raise ConfigError("the front's parts are not installed: pip install 'outrider[vllm]'")
    refuse(given)
    wish = read_wish(config, options, given, template)

    from outrider.integrations.vllm.build import examine, no_sampling, refuse_rule
    from outrider.integrations.vllm.child import Child, find_vllm, free_port
    from outrider.integrations.vllm.front import Front, make_front
    from outrider.integrations.vllm.mailbox import Mailbox
    from outrider.server.logs import set_up
    from outrider.server.run import PortTaken, bind, run

    inner = free_port()
    with tempfile.TemporaryDirectory(prefix="outrider-vllm-") as folder:
        predicts = wish.reads_predictions
        more = {"predictions": folder} if predicts else None
        args, environment = command(wish, host="127.0.0.1", port=inner, more=more)
        program = find_vllm()
        build = examine(program)
        refuse_rule(build, wish.verifier)
        # Keys are checked here. With a key in its environment, vLLM would refuse the front.
        environment["VLLM_API_KEY"] = ""
        try:
            listener = bind(config)
        except PortTaken as error:
            print("outrider:", error, file=sys.stderr)
            raise typer.Exit(1) from None
        with listener:
            set_up(config.log_format, config.log_level)
            print(f"outrider: starting {shown(args)}", file=sys.stderr, flush=True)
            why_not = no_sampling(build) if "--speculative-config" in args else None
            if why_not is not None:
                print(f"outrider: greedy requests only: {why_not}", file=sys.stderr, flush=True)
            front = Front(
                config,
                lambda: Child([str(program), *args], environment),
                f"http://127.0.0.1:{inner}",
                max_requests=wish.max_sequences + config.max_queue,
                restarts=wish.restarts,
                mailbox=Mailbox(Path(folder)) if predicts else None,
                no_sampling=why_not,
            )
            return run(front, make_front(front), listener)


def read_wish(
    config: ServerConfig,
    options: Mapping[str, Any],
    given: Collection[str],
    template: Path | None = None,
) -> Wish:
    """The options of `outrider serve` that concern vLLM; ConfigError for impossible ones."""
    names = {field.name for field in fields(Wish)}
    chosen = {name: value for name, value in options.items() if name in names}
    chosen["verifier"] = options["verifier"] if "verifier" in given else None
    if "draft_table" in chosen:
        chosen["draft_table"] = read_table(chosen["draft_table"])
    elif "num_draft_tokens" in given and options["num_draft_tokens"] == "auto":
        raise ConfigError("vLLM does not choose K by itself: give -k N or --draft-table")
    return Wish(
        **chosen,
        served_model_name=config.model_name,
        otlp_endpoint=config.otlp_endpoint,
        log_level=config.log_level,
        chat_template=template,
    )
