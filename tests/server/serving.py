"""A real server on a free port, with a tiny random model or a runner under the test's control: the tests' workbench."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import transformers as tf
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.config import EngineConfig
from octavo.runner.api import StepPlan, StepResult
from octavo.server.app import Built, build, create_app
from octavo.server.config import ServerConfig
from octavo.types import Sequence

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())  # token 4 + i is LETTERS[i]: every byte is a token
VOCABULARY = len(SPECIALS) + len(LETTERS)
EOS = 1
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    vocabulary = {word: i for i, word in enumerate((*SPECIALS, *LETTERS))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    made = tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def write_checkpoint(path: Path, template: str | None = TEMPLATE) -> Path:
    """A tiny random Llama with a byte tokenizer, as `transformers` saves it."""
    tf.set_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    tf.LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer(template).save_pretrained(path)
    return path


def ids_of(text: str) -> list[int]:
    return [int(i) for i in byte_tokenizer().encode(text, add_special_tokens=False)]


class ScriptedRunner:
    """Says what the test wants. `say(seq)` gives the next token; `gate` holds every step until it is open; `delay` is
    what a step takes; `fault(plan)` may raise."""

    def __init__(self, say: Callable[[Sequence], int] | None = None, delay: float = 0.0) -> None:
        self.say = say or (lambda seq: ids_of("abcdefghij")[seq.generated % 10])
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Callable[[StepPlan], None] = lambda plan: None
        self.steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        time.sleep(self.delay)
        self.fault(plan)
        self.steps += 1
        return StepResult(tuple(tuple(self.say(seq) for seq in work.samples) for work in plan.work))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""


def saying(text: str, then_end: bool = True) -> Callable[[Sequence], int]:
    """A model that answers `text` to everything, one byte a token."""
    tokens = ids_of(text)
    return lambda seq: tokens[seq.generated] if seq.generated < len(tokens) else (EOS if then_end else tokens[-1])


class Serving:
    """A running server: `url`, an HTTP `client`, and what is behind it."""

    def __init__(self, url: str, built: Built, app: Any) -> None:
        self.url, self.built, self.app = url, built, app
        self.state = app.state.octavo
        self.client = httpx.Client(base_url=url, timeout=60)

    @property
    def runner(self) -> Any:
        return self.built.engine.engine.runner

    def ask(self, look: Callable[[Any], Any]) -> Any:
        """`look(engine)`. Only for what is stable at the moment: it does not wait for the engine's thread."""
        return look(self.built.engine.engine)

    def until(self, holds: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait until something is true and return it."""
        end = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.005)
        return value

    def quiet(self) -> None:
        """All requests have ended: nothing is pinned, nothing is left behind (the quiet check)."""
        engine = self.built.engine.engine
        self.until(lambda: not engine.busy and not self.state.engine.live)
        engine.scheduler.check()
        assert not engine.scheduler.requests
        assert not self.state.labels
        kv = engine.scheduler.kv
        assert kv.free + kv.evictable == kv.capacity


@contextmanager
def serving(
    model: Path | str, *, runner: ScriptedRunner | None = None, server: dict[str, Any] | None = None, **engine: Any
) -> Iterator[Serving]:
    """`engine` are fields of EngineConfig, `server` those of ServerConfig. Ends with the quiet check."""
    defaults: dict[str, Any] = dict(kv_memory=4 << 20, max_num_batched_tokens=64, max_num_seqs=8, dtype="float32")
    config = ServerConfig(EngineConfig(str(model), **defaults | engine), **(server or {}))
    built = build(config)
    if runner is not None:
        built.engine.engine.runner = runner
    app = create_app(config, built)
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        one = Serving(f"http://127.0.0.1:{listener.getsockname()[1]}", built, app)
        one.until(lambda: web.started or not thread.is_alive())
        yield one
        if runner is not None:
            runner.gate.set()
        if one.state.engine.health().alive:
            one.quiet()
    finally:
        if runner is not None:
            runner.gate.set()
        web.should_exit = True
        thread.join(20)
