"""BERT, GPT-2 and a tagger of LSTM layers at full size, as exporters write them, with seeded weights."""

from __future__ import annotations

from pathlib import Path

from ortprep.children.child import run_child

LANGUAGE_MODELS = ("bert-base", "bilstm", "gpt2")


def write_language_model(name: str, path: Path) -> Path:
    """Writes one of `LANGUAGE_MODELS` in a child process, unless the file is there; returns the path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        run_child(_write, (name, str(path)))
    return path


def _write(request: tuple[str, str]) -> None:
    """Writes a model (child): its name, and the file."""
    from bench.language.bert import build_bert
    from bench.language.bilstm import build_bilstm
    from bench.language.gpt2 import build_gpt2

    name, path = request
    model = {"bert-base": build_bert, "bilstm": build_bilstm, "gpt2": build_gpt2}[name]()
    unfinished = Path(f"{path}.part")
    unfinished.write_bytes(model.SerializeToString(deterministic=True))
    unfinished.replace(path)
