"""PyTorch's attention on the same shapes, in a process of its own: it prints one JSON record a line.

Run by `speed.py`; on its own: `python -m benchmarks.torch_peers '[{"depth": 64, "length": 1024, "causal": false,
"batch": 16, "heads": 32}]' 'cuDNN (PyTorch)'`. Times are CUDA events around many
calls, the median of several such rounds after a warm-up.
"""

import json
import statistics
import sys

from benchmarks.cases import ERROR_BOUND, Case, flops, make_record
from benchmarks.timing import calls_per_execution

BACKENDS = {"FlashAttention-2 (PyTorch)": "FLASH_ATTENTION", "cuDNN (PyTorch)": "CUDNN_ATTENTION"}
_ROUNDS = 7


def measure(case: Case, method: str) -> list[dict]:
    """The records of one method's forward pass, and of forward and backward together."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    # SDPA takes [B, N, T, H]; the memory is [B, T, N, H] as everybody's here.
    query, key, value, dout = (
        torch.randn(case.shape, device="cuda").to(torch.bfloat16).transpose(1, 2) for _ in range(4)
    )

    def attend(*inputs):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)

    def forward():
        with torch.no_grad():
            return (attend(query, key, value),)

    def forward_and_backward():
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        out = attend(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    rows = []
    wanted = _exact_head(*(x[0, 0].float() for x in (query, key, value, dout)), causal=case.causal)
    with sdpa_kernel([getattr(SDPBackend, BACKENDS[method])]):
        for pass_, function in {"forward": forward, "forward+backward": forward_and_backward}.items():
            errors = [float((g[0, 0].float() - w).norm() / w.norm()) for g, w in zip(function(), wanted, strict=False)]
            worst, bound = max(errors), ERROR_BOUND["16-bit"]
            # Not `worst <= bound`: max() can lose a NaN.
            if all(error <= bound for error in errors):
                seconds, reason = _seconds(function, calls_per_execution(flops(case, pass_))), None
            else:
                seconds, reason = None, f"relative errors {errors} are not below {bound}"
            rows.append(make_record(case, method, pass_, {}, seconds=seconds, max_error=worst, error=reason))
    return rows


def _seconds(function, calls: int) -> float:
    """Median seconds of one call on the device."""
    import torch  # pyright: ignore[reportMissingImports]

    times = []
    for _ in range(_ROUNDS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    # The first round warms up.
    return statistics.median(times[1:])


def _exact_head(query, key, value, dout, *, causal, block=512):
    """Float32 attention of one head [T, H] and its gradients, in blocks of queries: (O, dQ, dK, dV)."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = False
    scale, length = query.shape[1] ** -0.5, query.shape[0]
    outs, dqs, dk, dv = [], [], torch.zeros_like(key), torch.zeros_like(value)
    for first in range(0, length, block):
        q, do = query[first : first + block], dout[first : first + block]
        s = scale * q @ key.T
        if causal:
            rows = torch.arange(first, first + len(q), device=q.device)
            s = s.masked_fill(rows[:, None] < torch.arange(length, device=q.device)[None, :], float("-inf"))
        p = s.softmax(-1)
        out = p @ value
        ds = p * (do @ value.T - (do * out).sum(-1, keepdim=True))
        outs.append(out)
        dqs.append(scale * ds @ key)
        dk, dv = dk + scale * ds.T @ q, dv + p.T @ do
    return torch.cat(outs), torch.cat(dqs), dk, dv


def main(arguments):
    """Measure every case given as JSON with the methods named after it; what fails becomes a record with its error."""
    for fields in json.loads(arguments[0]):
        case = Case(**fields)
        for method in arguments[1:]:
            try:
                rows = measure(case, method)
            except Exception as error:  # One peer must not end the run, whatever it raises.
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                rows = [make_record(case, method, p, {}, error=reason) for p in ("forward", "forward+backward")]
            for row in rows:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
