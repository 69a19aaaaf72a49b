"""The sizes of multi-head latent attention, by which DeepSeek's models keep one row of KV for all heads.

A token's hidden state is projected down to a *latent*, from which a matrix of each head makes its key and its value.
Beside the latent stands one key that carries the position (RoPE), and which all heads share. Only this row is kept. A
query takes its head's key matrix into itself (*absorbs* it), so that it is multiplied with latents directly; the head's value matrix
is applied to the sum of latents that attention returns. That is the *absorbed form*. In *plain form*, the latents of a
context are made keys and values of each head first, and attended to as those of any other model.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_PLAIN_ROWS = 16
"""Rows of a sequence below which its attention is in absorbed form."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of one layer's latent attention, in values.

    Attributes:
        query_rank: Width to which queries are projected down before they are projected up; 0: they are projected at once.
        kv_rank: Width of the latent.
        plain_dim: Width of the part of a head's query and key without position.
        rope_dim: Width of the part with position; the key's is shared by all heads.
        value_dim: Width of a head's value.
    """

    query_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    @property
    def row_dim(self) -> int:
        """Width of a token's row in the KV pool, and of a query that has absorbed its key matrix."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query before it absorbs anything."""
        return self.plain_dim + self.rope_dim

    @property
    def made_dim(self) -> int:
        """Width of a head's keys and values that are made of latents; the narrower ones are padded."""
        return max(self.query_dim, self.value_dim)

    @property
    def latent_flops(self) -> int:
        """FLOPs with which a head makes its key and value of a latent, or absorbs them for a row."""
        return 2 * self.kv_rank * (self.plain_dim + self.value_dim)

    def makes_heads(self, rows: int, keys: int, pairs: int) -> bool:
        """Return True if attention takes fewer FLOPs in plain form than in absorbed form.

        A head attends with `rows` rows to `keys` latents, in `pairs` pairs. In absorbed form, it absorbs its matrices once
        for each row, and a pair takes 4 FLOPs for each value of a row of the pool. In plain form, it makes keys and
        values of every latent, and a pair takes 4 FLOPs for each value of these. DeepSeek-V3 makes them from 171 rows
        on if the context is long. Few rows (`LEAST_PLAIN_ROWS`) are always in absorbed form: sequences share its products.
        """
        if rows < LEAST_PLAIN_ROWS:
            return False
        return keys * self.latent_flops + 4 * self.made_dim * pairs < (
            rows * self.latent_flops + 4 * self.row_dim * pairs
        )

    @property
    def least_made_rows(self) -> int | None:
        """Rows from which the plain form takes fewer FLOPs after a context of any length; None: it never does."""
        saved = 4 * (self.row_dim - self.made_dim)
        return None if saved <= 0 else max(self.latent_flops // saved + 1, LEAST_PLAIN_ROWS)

    def copied_parameters(self, hidden: int) -> int:
        """Return the number of weights that every tensor rank holds: the projections down, which no head owns."""
        return hidden * (self.query_rank + self.row_dim)

    def head_parameters(self, hidden: int) -> int:
        """Return the number of weights of one head: its query, its key and value matrices, and its part of the output."""
        query = (self.query_rank or hidden) * self.query_dim
        return query + self.kv_rank * (self.plain_dim + self.value_dim) + self.value_dim * hidden

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the number of weights of a layer's attention with so many heads.

        In absorbed form, a token passes each of them once, as in the plain form.
        """
        return self.copied_parameters(hidden) + heads * self.head_parameters(hidden)
