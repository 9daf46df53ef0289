"""SageBwd on what a trained model feeds it: its queries, keys and values, and the gradient that comes back to them.

Kernels of others passed with Gaussian inputs and were wrong with these, from a batch of two sequences on.
"""

import dataclasses
import io

import helpers
import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from train import loop
from train.config import PRESETS
from train.data import held_out_batches, load_corpus, unigram_loss
from train.health import attention_operands
from train.sample import load_model

BATCH, LENGTH = 3, 192


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """query, key, value and cotangent of both layers on held-out text, after 200 steps with exact attention."""
    tiny = PRESETS["tiny"]
    shape = dict(width=64, ffn_width=192, num_heads=2, num_kv_heads=1, head_dim=64, loss_chunk=LENGTH)
    config = dataclasses.replace(
        tiny,
        **dict(steps=200, eval_every=200, checkpoint_every=200, tensorboard=False),
        **dict(mesh="data=1", tokens_per_step=tiny.micro_batch * LENGTH),
        model=dataclasses.replace(tiny.model, attention="exact", **shape),
        data=dataclasses.replace(tiny.data, sequence_length=LENGTH),
    )
    result = loop.train(config, run_dir=tmp_path_factory.mktemp("runs") / "run", console=Console(file=io.StringIO()))
    corpus = load_corpus(config.data, config.model.vocab_size)
    # It has learned more than how often each byte occurs, for which there must be attention.
    assert result.held_out_loss < unigram_loss(corpus, config.model.vocab_size) - 0.3
    graphdef, params = nnx.split(load_model(result.run_dir, None)[1])
    [(batch, _)] = held_out_batches(corpus, sequences=BATCH, batch=BATCH, length=LENGTH, packed=False)
    return jax.jit(lambda params, tokens: attention_operands(graphdef, params, tokens, config.model))(
        params, batch.tokens
    )


def test_output_and_gradients_are_those_of_exact_attention(layers, implementation):
    run = helpers.forward_and_backward(implementation, is_causal=True)
    assert len(layers) == 2
    for layer, operands in enumerate(layers):
        assert operands[0].shape == (BATCH, LENGTH, 2, 64)
        got, expected = run(*operands), helpers.exact(*operands, is_causal=True)
        helpers.assert_cosines(got, expected, out=0.99, dq=0.99, dk=0.99, dv=0.99)
        for name in ("out", *helpers.GRADS):
            a, b = (helpers.as_float64(getattr(x, name)) for x in (got, expected))
            assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=0.1), f"layer {layer}: {name}"
            # Of each head of each sequence: a sign that flips in one of them is lost in the mean.
            of_heads = [[helpers.cosine(a[i, :, h], b[i, :, h]) for h in range(a.shape[2])] for i in range(BATCH)]
            assert np.min(of_heads) > 0.9, f"layer {layer}: cosines of {name} {of_heads}"
