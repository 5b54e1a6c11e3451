"""Transformers over tokens in the published sizes: BERT base and GPT-2 small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

from bench.exported.exportable import TORCHSCRIPT, Exportable, floats, integers
from bench.exported.seeding import enliven_constants

BERT_WORDS, GPT2_WORDS = 30522, 50257
GPT2_LAYERS, GPT2_HEADS, GPT2_HEAD_SIZE = 12, 12, 64

# Eager attention is spelled out as MatMul and Softmax, which is what ONNX Runtime's fusions look for.
_EAGER = "eager"


class _Bert(nn.Module):
    """Hidden states and pooled output, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(attn_implementation=_EAGER))

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> tuple[Any, Any]:
        answer = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return answer.last_hidden_state, answer.pooler_output


class _Gpt2(nn.Module):
    """A decoding step whose cache is flat: key and value of the first layer, of the second, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = GPT2LMHeadModel(GPT2Config(attn_implementation=_EAGER))

    def forward(self, input_ids: Any, attention_mask: Any, *past: Any) -> tuple[Any, ...]:
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        answer = self.gpt2(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True
        )
        layers = answer.past_key_values.layers
        return (answer.logits, *(kept for layer in layers for kept in (layer.keys, layer.values)))


def _build_bert() -> Any:
    module = _Bert().eval()
    enliven_constants(module)
    return module


def _build_gpt2() -> Any:
    module = _Gpt2().eval()
    enliven_constants(module)
    return module


def _cache_names(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{layer}.{part}" for layer in range(GPT2_LAYERS) for part in ("key", "value"))


BERT_BASE = Exportable(
    _build_bert,
    inputs=(
        integers("input_ids", ("batch", "sequence"), low=0, high=BERT_WORDS - 1),
        integers("attention_mask", ("batch", "sequence"), low=1, high=1),
        integers("token_type_ids", ("batch", "sequence"), low=0, high=1),
    ),
    outputs=("last_hidden_state", "pooler_output"),
    sizes=({"batch": 1, "sequence": 128}, {"batch": 4, "sequence": 32}),
    example={"batch": 2, "sequence": 7},
)
"""BERT base, 110 M parameters: 12 layers of 768."""

BERT_BASE_TORCHSCRIPT = replace(BERT_BASE, exporter=TORCHSCRIPT)
"""The same weights by the older exporter; ONNX Runtime 1.31.1 finds `Attention` in this one alone."""

GPT2 = Exportable(
    _build_gpt2,
    inputs=(
        integers("input_ids", ("batch", "sequence"), low=0, high=GPT2_WORDS - 1),
        integers("attention_mask", ("batch", "total_sequence"), low=1, high=1),
        *(
            floats(name, ("batch", GPT2_HEADS, "past_sequence", GPT2_HEAD_SIZE))
            for name in _cache_names("past_key_values")
        ),
    ),
    outputs=("logits", *_cache_names("present")),
    sizes=(
        {"batch": 1, "sequence": 1, "past_sequence": 127, "total_sequence": 128},
        {"batch": 2, "sequence": 16, "past_sequence": 32, "total_sequence": 48},
    ),
    example={"batch": 2, "sequence": 3, "past_sequence": 5, "total_sequence": 8},
    variadic=2,
)
"""GPT-2 small, 124 M parameters: 12 layers of 768, a cache of keys and values in and out."""
