"""Views inside one program: whoever reads a tensor must not assume how it lies in memory."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bitwise, forward_and_backward, make_inputs, normal, using

from sagebwd_jax import attention


@pytest.mark.parametrize(("dtype", "depth"), [("float32", 32), ("bfloat16", 64)])
class TestStrides:
    def test_split_of_a_fused_projection(self, implementation, dtype, depth):
        fused = normal(0, 2, 70, 3, 4, depth, dtype=dtype)
        dout = normal(1, 2, 70, 4, depth, dtype=dtype)
        run = forward_and_backward(implementation, training=True)
        got = jax.jit(lambda x: run(x[:, :, 0], x[:, :, 1], x[:, :, 2], dout))(fused)
        copies = [jnp.array(fused[:, :, i]) for i in range(3)]
        assert_bitwise(got, run(*copies, dout))

    def test_heads_first_inputs_and_a_broadcast_cotangent(self, implementation, dtype, depth):
        inputs = [x.swapaxes(1, 2) for x in make_inputs(66, 70, depth=depth, dtype=dtype)[:3]]

        def loss(*inputs):
            with using(implementation) as name:
                out = attention(*(x.swapaxes(1, 2) for x in inputs), implementation=name)
            return out.transpose(3, 0, 2, 1).sum(0).sum()

        got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)
        turned = [jnp.array(x.swapaxes(1, 2)) for x in inputs]
        expected = forward_and_backward(implementation, training=True)(*turned, jnp.ones_like(turned[0]))
        assert_bitwise([x.swapaxes(1, 2) for x in got], [expected.dq, expected.dk, expected.dv])
