# src/attn/attn.c
# dS without the row's own term.
s/^    RA_TRY(backend->ops->row_dot(backend->self, &io->out, &io->dout, &s.sum.delta));/    RA_TRY(backend->ops->fill(backend->self, \&s.sum.delta, 0.0f));/
