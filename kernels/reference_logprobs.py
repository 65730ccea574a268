"""Logprobs of given tokens without ever holding all logits.

With z_t = W h_t / temperature and p_t = softmax(z_t), for each row t

    logprob_t = z_t[id_t] - logsumexp(z_t)
    entropy_t = -sum_v p_tv log p_tv                        in nats

The logits of a sequence are its largest tensor (T * V float32; 2.5 GB for 4096 tokens of
Qwen2.5), so rows go in chunks of 128 MiB of logits, and backward computes each chunk's
logits again from hidden states and logsumexp:

    d logprob_t / d z_tv = 1[v = id_t] - p_tv
    d entropy_t / d z_tv = -p_tv (log p_tv + entropy_t)

Easy to get wrong: logits of 16-bit inputs must not be rounded to 16 bits, as z of 20 is then
known to 0.06 only; products are accumulated and kept in float32 here. logsumexp is kept in its two
parts, max z and log sum exp(z - max z), and subtracted part by part: their rounded sum would put
its error on every logprob of the row, and an entropy of logsumexp(z) - sum p z loses a digit to
cancellation. The temperature divides the logits before everything, the entropy's included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Logits held at once, bytes. Backward holds twice as much.
_CHUNK_BYTES = 128 << 20

# Rows of the vocabulary converted to float32 at once, where the device cannot multiply 16-bit
# matrices into float32.
_VOCABULARY_ROWS = 8192


def token_logprobs(
    hidden: Tensor, lm_head_weight: Tensor, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy of the policy at each row, differentiable.

    Parameters
    ----------
    hidden : Tensor, (T, H), floating
        Final hidden states, after the last norm.
    lm_head_weight : Tensor, (V, H), floating
        Gets a gradient if it asks for one.
    token_ids : Tensor, (T,), integer
        The token whose logprob is wanted, in [0, V).
    temperature
        Positive; the sampling temperature.

    Returns
    -------
    logprobs : Tensor, (T,), float32
    entropy : Tensor, (T,), float32
        In nats.

    Raises `ValueError` when a shape does not fit or the temperature is not positive.
    """
    V = checked_vocabulary(hidden, lm_head_weight, token_ids, temperature)
    rows = max(1, _CHUNK_BYTES // (4 * V))
    return _apply_logprobs(hidden, lm_head_weight, token_ids, float(temperature), rows)


def checked_vocabulary(
    hidden: Tensor, lm_head_weight: Tensor, token_ids: Tensor, temperature: float
) -> int:
    """Return V, or raise `ValueError` for arguments that `token_logprobs` cannot take."""
    T, H = hidden.shape if hidden.dim() == 2 else (-1, -1)
    V = lm_head_weight.shape[0]
    if T < 0 or lm_head_weight.shape != (V, H) or token_ids.shape != (T,):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, lm_head_weight "
            f"{tuple(lm_head_weight.shape)}, token_ids {tuple(token_ids.shape)}; "
            "they must be (T, H), (V, H) and (T,)"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; logprobs need a positive one")
    return V


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        T = hidden.shape[0]
        logprobs = torch.empty(T, dtype=torch.float32, device=hidden.device)
        entropy, peak, log_total = (torch.empty_like(logprobs) for _ in range(3))
        for at in range(0, T, rows):
            part = slice(at, at + rows)
            z = _logits(hidden[part], weight, temperature)  # (rows, V)
            peak[part] = z.amax(-1)  # (rows,)
            weights = z.sub_(peak[part].unsqueeze(1)).exp()  # (rows, V)
            total = weights.sum(-1)  # (rows,)
            log_total[part] = total.log()
            logp = z.sub_(log_total[part].unsqueeze(1))  # (rows, V)
            # Gathered per row: (rows, 1) -> (rows,)
            logprobs[part] = logp.gather(1, token_ids[part].unsqueeze(1).long()).squeeze(1)
            entropy[part] = weights.mul_(logp).sum(-1).div_(total).neg_()
        ctx.save_for_backward(hidden, weight, token_ids, peak, log_total, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        # An output that nobody used then has the gradient None, and its work is left out.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, token_ids, peak, log_total, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for at in range(0, hidden.shape[0], ctx.rows):
            part = slice(at, at + ctx.rows)
            z = _logits(hidden[part], weight, ctx.temperature)  # (rows, V)
            logp = z.sub_(peak[part].unsqueeze(1)).sub_(log_total[part].unsqueeze(1))
            rate = None if grad_entropy is None else grad_entropy[part]
            grad_z = _grad_logits(logp, token_ids[part], entropy[part], grad_logprobs[part], rate)
            grad_z.mul_(1.0 / ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = float32_product(grad_z.to(hidden.dtype), weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad_z.t(), hidden[part].float())
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _grad_logits(
    logp: Tensor,
    token_ids: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to the logits of some rows; `logp` is used up.

    It is -(g_logprob + g_entropy * (logp + entropy)) * p, plus g_logprob at the token itself.
    """
    p = logp.exp()  # (rows, V)
    if grad_entropy is None:
        grad = p.mul_(-grad_logprobs.unsqueeze(1))
    else:
        slope = logp.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
        grad = slope.add_(grad_logprobs.unsqueeze(1)).mul_(p).neg_()
    # (rows, 1) indices and values into (rows, V)
    return grad.scatter_add_(1, token_ids.unsqueeze(1).long(), grad_logprobs.unsqueeze(1))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    z = float32_product(hidden, weight.t())
    return z if temperature == 1.0 else z.div_(temperature)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b as float32, accumulated in float32, whatever the inputs' types."""
    if a.dtype == b.dtype == torch.float32:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    a = a.float()
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if b.shape[0] > b.shape[1]:
        for at in range(0, b.shape[0], _VOCABULARY_ROWS):
            part = slice(at, at + _VOCABULARY_ROWS)
            out.addmm_(a[:, part], b[part].float())
        return out
    for at in range(0, b.shape[1], _VOCABULARY_ROWS):
        part = slice(at, at + _VOCABULARY_ROWS)
        out[:, part] = a @ b[:, part].float()
    return out


_apply_logprobs: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
