# src/attn/attn.c
# dS without the row's own term.
s/^    return backend->ops->row_dot(backend->self, &io->out, &io->dout, &s->delta);/    return backend->ops->fill(backend->self, \&s->delta, 0.0f);/
