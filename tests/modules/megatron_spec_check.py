"""The spec of ficco.integrations.megatron, of Megatron-Core's modules or of stand-ins for them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import ficco

NAME = "ficco.integrations.megatron"
_ENGINE = "megatron.core.extensions.transformer_engine"
_PARTS = ("input_layernorm", "pre_mlp_layernorm")


def megatron_spec(modules: Any) -> Any:
    """Check the parts of the spec, by Megatron-LM's arguments; return the spec without any.

    Args:
        modules: a context manager: modules(path, **contents) makes a module importable.
    """
    engine = import_module(_ENGINE)
    refused("finds no Transformer Engine; install transformer-engine[pytorch], or use --transfor")
    engine.HAVE_TE = True  # type: ignore[attr-defined]
    try:
        spec = _fresh().gpt_spec
        _check(spec, engine, None)
        _check(_fresh().gpt_layer_spec(qk_layernorm=True), engine, "k_layernorm")

        def unset() -> Any:
            raise AssertionError("args is not initialized.")

        with modules("megatron.training", get_args=unset):
            _check(_fresh().gpt_spec, engine, None)
        args = SimpleNamespace(num_experts=None, fp8=None, qk_layernorm=True)
        with modules("megatron.training", get_args=lambda: args):
            _check(_fresh().gpt_spec, engine, "k_layernorm")
            args.multi_latent_attention = True
            _check(_fresh().gpt_spec, engine, "kv_layernorm")
            args.fp8 = "hybrid"
            refused("fp8='hybrid' asks for 8-bit GEMMs")
            args.num_experts = 8
            refused("num_experts=8 asks for mixtures of experts; use --transformer-impl local")
    finally:
        engine.HAVE_TE = False  # type: ignore[attr-defined]
        sys.modules.pop(NAME, None)
    return spec


def refused(words: str) -> None:
    """Check that the module cannot be imported, and why."""
    try:
        _fresh()
    except ficco.InputError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def _fresh() -> Any:
    """Import the module as Megatron-LM does, for the first time."""
    sys.modules.pop(NAME, None)
    return import_module(NAME)


def _check(spec: Any, engine: Any, second: str | None) -> None:
    """Check the kinds of a spec's parts; `second`: the name of the second norm of the attention."""
    layer = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    norms = [getattr(layer, part) for part in _PARTS]
    norms += [] if second is None else [attention.q_layernorm, getattr(attention, second)]
    assert all(norm is engine.TENorm for norm in norms), norms
    assert second is not None or attention.q_layernorm.__name__ == "IdentityOp"
    assert attention.core_attention is engine.TEDotProductAttention
    rows, columns = {attention.linear_proj, mlp.linear_fc2}, [mlp.linear_fc1]
    columns += [each for name, each in vars(attention).items() if name in ("linear_qkv",)]
    assert {row.__name__ for row in rows} == {"RowParallelLinear"}, rows
    assert {column.__name__ for column in columns} == {"ColumnParallelLinear"}, columns
