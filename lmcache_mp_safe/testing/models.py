"""Tiny random models that feel their whole prefix: for tests, the demo and `verify`.

A model with ordinary random weights is a bad witness. Its recurrent gates forget within a few tokens and its
attention is nearly uniform, so a wrong state or a wrong page changes no output; and no draft is ever right, so
speculation is all rejection. These models are built the other way round: slow gates (`A_log = -7`), sharp attention,
no routing that could flip on rounding noise, and a leaning towards the word they know.

A *word* is a run of `WORD` consecutive token ids, and the hybrid and the attention model lean towards the successor
of a token inside its word. Not strongly: a wrong prefix still changes every log-probability and mostly the first
token. But about a third of what is drafted is accepted, by MTP on any prompt and by ngram on a prompt made of words
(`oracle.sessions` makes those).

They are written in bfloat16, need no tokenizer and take part of a second to write. The same kind and seed give the
same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file

ModelKind = Literal["hybrid", "attention", "window"]
Weights: TypeAlias = dict[str, torch.Tensor]

VOCABULARY = 512
WORD = 8
HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MAX_LENGTH = 32768

# hybrid: three gated-delta-net layers, then one of full attention, as in Qwen3-Next
LINEAR_HEAD_DIM, KEY_HEADS, VALUE_HEADS, CONV_KERNEL = 128, 2, 4, 4  # vLLM's CPU kernels refuse a head dim of 32
EXPERTS, EXPERT_WIDTH = 4, 64
SLOW_GATE = -7.0  # A_log: the state still carries a token hundreds of tokens later

# window: a window of a few of vLLM's 32-token blocks
WINDOW_TOKENS = 96

# Queries and keys are normalised, so their logits have a standard deviation of one: attention over a long prefix is
# then an average in which no single token counts. This factor on both sides makes it pick.
SHARPNESS = 1.8


# Size of an embedding against what the layers add to it: how strong the leaning towards the successor is.
LEANING = 0.6


def successor(token: int) -> int:
    """The token that follows in the same word; the last one leads back to the first."""
    return token // WORD * WORD + (token + 1) % WORD


def write_model(kind: ModelKind, path: Path | str, seed: int = 0) -> Path:
    """Write `config.json` and `model.safetensors` into the directory `path`, and return it.

    Kinds:
        hybrid: Qwen3-Next: gated delta net, gated delta net, gated delta net, full attention, and an MTP module.
        attention: Qwen3, four layers of full attention.
        window: Gemma 3, sliding-window and full attention in turn.
    """
    if kind not in get_args(ModelKind):
        raise ValueError(f"no model kind {kind!r}: one of {', '.join(get_args(ModelKind))}")
    config, weights = _BUILDERS[kind](_Draws(seed))
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: w.to(torch.bfloat16) for name, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**_COMMON, **config}, indent=1))
    return path


class _Draws:
    """The random matrices of one model, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        """Rows of unit length on average, so that activations keep their scale."""
        return torch.randn(*shape, generator=self._generator) / math.sqrt(shape[-1])


_COMMON: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.02,
}


def _hybrid(draws: _Draws) -> tuple[dict[str, Any], Weights]:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    weights = _embeddings(draws, norm=0.0)
    for index, kind in enumerate(kinds):
        weights |= _hybrid_layer(draws, f"model.layers.{index}", kind)
    weights |= _hybrid_layer(draws, "mtp.layers.0", "full_attention")
    weights |= {
        # Of (embedding of the last token, hidden state before it) the embedding alone: it says what follows.
        "mtp.fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        "mtp.norm.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(HIDDEN),
    }
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": kinds,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,  # all of them: no routing that flips on rounding noise
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],  # vLLM builds the MTP layer as layer 0, so every layer must be sparse
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": EXPERT_WIDTH,
        "num_nextn_predict_layers": 1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    return config, weights


def _hybrid_layer(draws: _Draws, prefix: str, kind: str) -> Weights:
    weights = {
        f"{prefix}.input_layernorm.weight": torch.zeros(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.zeros(HIDDEN),
    }
    if kind == "full_attention":
        weights |= _attention(draws, f"{prefix}.self_attn", query_rows=2, norm=SHARPNESS - 1)  # query and output gate
    else:
        weights |= _delta_net(draws, f"{prefix}.linear_attn")
    return weights | _experts(draws, f"{prefix}.mlp")


def _attention_only(draws: _Draws) -> tuple[dict[str, Any], Weights]:
    weights = _embeddings(draws, norm=1.0)
    for index in range(4):
        prefix = f"model.layers.{index}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
        weights |= _attention(draws, f"{prefix}.self_attn", query_rows=1, norm=SHARPNESS)
        weights |= _gated_mlp(draws, f"{prefix}.mlp", 2 * HIDDEN)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": False,
    }
    return config, weights


def _window(draws: _Draws) -> tuple[dict[str, Any], Weights]:
    weights = _embeddings(draws, norm=0.0, scale=LEANING / math.sqrt(HIDDEN))  # the model multiplies by the root itself
    del weights["lm_head.weight"]  # vLLM ties the two whatever the configuration says
    for index in range(4):
        prefix = f"model.layers.{index}"
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{prefix}.{name}_layernorm.weight"] = torch.zeros(HIDDEN)
        weights |= _attention(draws, f"{prefix}.self_attn", query_rows=1, norm=SHARPNESS - 1)
        weights |= _gated_mlp(draws, f"{prefix}.mlp", 2 * HIDDEN)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }
    return config, weights


_BUILDERS: Mapping[ModelKind, Callable[[_Draws], tuple[dict[str, Any], Weights]]] = {
    "hybrid": _hybrid,
    "attention": _attention_only,
    "window": _window,
}


def _embeddings(draws: _Draws, *, norm: float, scale: float = LEANING) -> Weights:
    rows = draws.matrix(VOCABULARY, HIDDEN)
    head = torch.empty_like(rows)
    head[[successor(token) for token in range(VOCABULARY)]] = rows
    return {
        "model.embed_tokens.weight": rows * math.sqrt(HIDDEN) * scale,
        "model.norm.weight": torch.full((HIDDEN,), norm),
        "lm_head.weight": head,
    }


def _attention(draws: _Draws, prefix: str, *, query_rows: int, norm: float) -> Weights:
    return {
        f"{prefix}.q_proj.weight": draws.matrix(query_rows * HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.k_proj.weight": draws.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.v_proj.weight": draws.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.o_proj.weight": draws.matrix(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.q_norm.weight": torch.full((HEAD_DIM,), norm),
        f"{prefix}.k_norm.weight": torch.full((HEAD_DIM,), norm),
    }


def _delta_net(draws: _Draws, prefix: str) -> Weights:
    keys, values = KEY_HEADS * LINEAR_HEAD_DIM, VALUE_HEADS * LINEAR_HEAD_DIM
    return {
        f"{prefix}.in_proj_qkvz.weight": draws.matrix(2 * keys + 2 * values, HIDDEN),
        f"{prefix}.in_proj_ba.weight": draws.matrix(2 * VALUE_HEADS, HIDDEN),
        f"{prefix}.conv1d.weight": draws.matrix(2 * keys + values, 1, CONV_KERNEL),
        f"{prefix}.A_log": torch.full((VALUE_HEADS,), SLOW_GATE),
        f"{prefix}.dt_bias": torch.zeros(VALUE_HEADS),
        f"{prefix}.norm.weight": torch.ones(LINEAR_HEAD_DIM),
        f"{prefix}.out_proj.weight": draws.matrix(HIDDEN, values),
    }


def _gated_mlp(draws: _Draws, prefix: str, width: int) -> Weights:
    return {
        f"{prefix}.gate_proj.weight": draws.matrix(width, HIDDEN),
        f"{prefix}.up_proj.weight": draws.matrix(width, HIDDEN),
        f"{prefix}.down_proj.weight": draws.matrix(HIDDEN, width),
    }


def _experts(draws: _Draws, prefix: str) -> Weights:
    weights = {
        f"{prefix}.gate.weight": draws.matrix(EXPERTS, HIDDEN),
        f"{prefix}.shared_expert_gate.weight": draws.matrix(1, HIDDEN),
    }
    for name in [*(f"experts.{index}" for index in range(EXPERTS)), "shared_expert"]:
        weights |= _gated_mlp(draws, f"{prefix}.{name}", EXPERT_WIDTH)
    return weights
