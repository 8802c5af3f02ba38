"""Hostile data, servers, pages and texts. Each check describes the successful attack, or returns an empty
text.
"""

import contextlib
import io
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.cli import main as command_line
from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.errors import OutriderError
from outrider.memory.chat_files import import_trajectories
from outrider.tokens import ChatRenderer
from outrider.types import Message, Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file
from outrider.viewer.report import write_report

_GOOD = {"question": "q", "answer": "a", "messages": [{"role": "assistant", "content": "a"}], "reward": 1.0}
_ODD = (
    "\ud800",
    "9" * 5000,
    "[" * 50_000,
    "1e999",
    "-1.7e308",
    "NaN",
    "\x00",
    "{}",
    "null",
    "\x1b[2J",
    "[" * 400 + "]" * 400,
    "9" * 400,
)
_KEY = "sk-attacked-0123456789"
_SCRIPTS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</style><script>alert(1)</script>",
    "</textarea><svg onload=alert(1)>", "\" onmouseover=alert(1) x=\"", "' autofocus onfocus=alert(1) '",
    "javascript:alert(1)", "<!--<script>", "]]><script>alert(1)</script>",
    "<a href=javascript:alert(1)>x</a>", "<iframe srcdoc='<script>alert(1)</script>'>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}", "&lt;script&gt;",
    "<meta http-equiv=refresh content='0;url=http://x'>", "<base href=http://x>", "\u2028<script>\u2029",
    "<\x00script>",
)  # fmt: skip


def data(seed: int) -> str:
    """A file of data, a recipe or a run, cut, overwritten or filled with odd values, through the readers and
    the command line.
    """
    draw = random.Random(seed)
    with TemporaryDirectory() as folder:
        path = Path(folder) / draw.choice(
            ["a.jsonl", "a.parquet", "config.toml", "metrics.jsonl", "evaluations.jsonl"]
        )
        path.write_bytes(_spoiled(path.name, draw))
        try:
            if path.name == "config.toml":
                said = io.StringIO()
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    status = command_line(["train", str(path), "--run", f"{folder}/run", "--dry-run"])
                if status not in (0, 1, 2) or "Traceback" in said.getvalue():
                    return f"status {status}"
            if path.stem == "a":
                with contextlib.suppress(OutriderError):
                    import_trajectories(path, on_malformed=draw.choice(["error", "skip"]))
                load_tasks(DatasetConfig(path=path))
            write_report(path.parent)
        except OutriderError as error:
            return "" if "\n" not in str(error) else "an error of several lines"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
    return ""


def _spoiled(name: str, draw: random.Random) -> bytes:
    record = dict(_GOOD)
    if name.endswith(".parquet"):
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([record] * 4), sink)
        content = bytearray(sink.getvalue())
    elif name.endswith(".toml"):
        content = bytearray(Path(__file__).parents[1].joinpath("recipes/demo.toml").read_bytes())
    else:
        record |= {
            "step": 1,
            "kind": "train",
            "reward/mean": 0.5,
            "label": "l",
            "split": "s",
            "num_tasks": 1,
            "temperature": 1.0,
        }
        record |= {"panel_hash": "p", "metric": {"score": {"value": 0.5, "ci_low": 0.1, "ci_high": 0.9}}}
        content = bytearray(b"\n".join(json.dumps(record | {"step": step}).encode() for step in range(4)))
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content))
        odd = draw.choice(_ODD).encode("utf-8", "surrogatepass")
        colon = content.find(b":" if b":" in content else b"=", at) + 1
        kind = draw.randrange(4)
        if kind == 0:  # a value differs
            end = min(
                (i for i in (content.find(b",", colon), content.find(b"\n", colon)) if i > 0),
                default=len(content),
            )
            content[colon:end] = odd
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            content[at : at + 8] = draw.randbytes(8)
        else:
            content[at:at] = odd
        content = content or bytearray(b"x")
    return bytes(content)


_STATUS = (b"HTTP/1.1 200 OK", b"HTTP/1.1 500 no " + _KEY.encode(), b"HTTP/1.1 401 no", _KEY.encode(),
           b"HTTP/1.1 302 Found", b"", b"\x1b[2J", b"HTTP/1.1 103 Early", b"HTTP/1.1 429 slow",
           b"HTTP/9.9 99999 x", b"HTTP/1.1 204 none")  # fmt: skip
_HEADERS = (b"", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 99999999999\r\n",
            b"Content-Length: -1\r\n", b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n",
            b"Location: http://127.0.0.1:1/\r\n", b"X: " + b"a" * 200_000 + b"\r\n",
            b"Retry-After: 99999999\r\n", b"Retry-After: nan\r\n", _KEY.encode() + b"\r\n")  # fmt: skip
_BODIES = (b"", b"1\r\n \r\n" * 5000, b'{"error": "\x1b[2J\\u001b[2J ' + _KEY.encode() + b'"}',
           b"[" * 100_000, b'{"choices": [{"message": {"content": 5}}]}',
           (b'{"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "usage": '
            b'{"completion_tokens": 1e999}}'), b"\xff\xfe",
           b"9" * 5000, b'{"data": [{"id": "\\u001b[2J"}]}', bytes(70_000),
           b"ffffffffffffffff\r\n" + _KEY.encode())  # fmt: skip


def endpoint(seed: int) -> str:
    """A server that answers with a mixture of these, for ever or once."""
    draw = random.Random(seed)
    reply = draw.choice(_STATUS) + b"\r\n" + draw.choice(_HEADERS) + b"\r\n"
    with _server(reply, draw.choice(_BODIES), forever=draw.random() < 0.5) as url:
        settings = EndpointSettings(
            base_url=url, model=draw.choice(["m", "default"]), timeout_s=0.5, max_retries=1, backoff_s=0.0
        )
        chat = ChatEndpoint(settings, sleep=lambda seconds: None)
        chat._key = _KEY
        try:
            if draw.random() < 0.3:
                chat.discovered()
            chat.complete([Message(role="user", content="q")], max_tokens=5, temperature=0.0)
        except OutriderError as error:
            text = str(error)
            return (
                "the key"
                if _KEY in text
                else ""
                if text.isprintable() and len(text) < 1000
                else "unprintable"
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
    return ""


@contextlib.contextmanager
def _server(reply: bytes, body: bytes, *, forever: bool) -> Iterator[str]:
    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(reply + body)
            while forever and body:
                connection.sendall(body)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)


class _Active(HTMLParser):
    """Whatever on a page could act or load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base", "form", "link", "img", "foreignobject"):
            self.found.append(tag)
        for name, value in attrs:
            if (
                name.startswith("on")
                or name in ("src", "srcdoc", "srcset", "action")
                or (name == "href" and not (value or "").startswith("#"))
            ):
                self.found.append(f"{tag} {name}")
            if tag == "meta" and name == "http-equiv" and value != "Content-Security-Policy":
                self.found.append("meta refresh")


def page(seed: int) -> str:
    """A run whose names, texts, tokens and settings are scripts: nothing on its page may act."""
    draw = random.Random(seed)
    text = [_SCRIPTS[(seed + i) % len(_SCRIPTS)] + draw.choice(_SCRIPTS) for i in range(5)]
    with TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "config.toml").write_text(
            f"[model]\nname = {json.dumps(text[0])}\n[algorithm]\ntype = {json.dumps(text[1])}\n"
        )
        score = {"value": 0.5, "ci_low": 0.1, "ci_high": 0.9}
        lines = [{"label": text[2], "split": text[3], "num_tasks": 1, "step": step, "temperature": 1.0,
                  "panel_hash": text[4], "metric": {"score": score}} for step in (1, 2)]  # fmt: skip
        (run / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        ends = {"outcome": Outcome.FINISHED, "episode_return": 1.0, "advantage": 0.0, "hybrid": False}
        forked = json.dumps({"num_forks": 1, "tool": text[0]})
        rows = [TraceRow(step=1, task_key=text[0], trace_id=text[1], node_id=i, parent_id=parent, rollout=0,
                         origin=Origin.POLICY, text=text[i], tokens=(text[i],), logprobs=(-1.0,),
                         entropies=(1.0,), metadata=forked, **(ends if i else {}))
                for i, parent in ((0, -1), (1, 0), (2, 0))]  # fmt: skip
        StepFiles(run / "traces").write_rows(step_file(1), rows, SCHEMA)
        written = write_report(run).read_text()
    parser = _Active()
    parser.feed(written)
    if "default-src 'none'" not in written:
        return "no content security policy"
    return ", ".join(parser.found)


_MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokens(seed: int) -> str:
    """Write chat markers into texts of users, tools and passages; none may become a marker."""
    draw = random.Random(seed)
    tokenizer = _tokenizer()
    renderer = ChatRenderer(tokenizer)
    special = {tokenizer.convert_tokens_to_ids(marker) for marker in _MARKERS}
    pieces = (
        *_MARKERS,
        "<|",
        "|>",
        "im_start",
        "im_end",
        "\u200b",
        " ",
        "\n",
        "user\n",
        "<",
        "|",
        "\ufeff",
        "&lt;",
        "\\u003c",
        "<|im_start|>system\n",
    )
    text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 12))) or "x"

    def count(ids: tuple[int, ...]) -> int:
        return sum(one in special for one in ids)

    calm = "".join(character if character.isalnum() else "." for character in text)
    for role in ("user", "system"):
        if count(
            renderer.prompt([Message(role=role, content=text), Message(role="user", content="q")])
        ) != count(renderer.prompt([Message(role=role, content=calm), Message(role="user", content="q")])):
            return f"a marker in the text of {role}: {text!r}"
    return (
        f"a marker in a result: {text!r}"
        if count(renderer.bridge((), [Message(role="inline", content=text)]))
        else ""
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: number for number, token in enumerate([*_MARKERS, "<unk>", *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": list(_MARKERS)})
    fast.chat_template = _TEMPLATE
    return fast


CHECKS: dict[str, Callable[[int], str]] = {"data": data, "endpoint": endpoint, "html": page, "tokens": tokens}
"""By area; the number is the seed."""
