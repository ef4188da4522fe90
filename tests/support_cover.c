/* See support_cover.h. The answer is computed over a flat list of tokens, so that it shares neither
 * pieces nor intervals with the code under test. */
#include "support_cover.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/mathx.h"

#define NEW(pointer, count) assert_int_equal(RA_NEW((pointer), (count)), RA_OK)

static int64_t extent(const ra_tensor *t)
{
    int64_t elements = t->size[RA_CHAN];
    for (int i = 0; i < RA_CHAN; i++) {
        elements += (t->size[i] - 1) * t->stride[i];
    }
    return ra_tensor_count(t) > 0 ? elements : 0;
}

/* All NaN; [B, H, S, D] or [B, S, H, D] in memory, with or without gaps. */
static ra_tensor new_tensor(bool seq_outside, int64_t gap, ra_dtype dtype, int64_t rows,
                            int64_t heads, int64_t seq, int64_t chan)
{
    ra_tensor t = ra_tensor_bhsd(NULL, dtype, rows, heads, seq, chan);
    int64_t row = chan + gap;
    t.stride[RA_SEQ] = seq_outside ? row * heads : row;
    t.stride[RA_HEAD] = seq_outside ? row : row * seq;
    t.stride[RA_ROW] = row * heads * seq;
    size_t bytes = (size_t)extent(&t) * ra_dtype_bytes(dtype);
    assert_int_equal(ra_alloc(bytes, 1, &t.data), RA_OK);
    if (bytes) {
        memset(t.data, 0xff, bytes); /* a NaN in every dtype */
    }
    return t;
}

bool cover_same_bits(const ra_tensor *a, const ra_tensor *b)
{
    size_t bytes = (size_t)extent(a) * ra_dtype_bytes(a->dtype);
    return bytes == 0 || memcmp(a->data, b->data, bytes) == 0;
}

/* ---- tokens and pieces */

static cover_token *flatten(const ra_cover *cover, const ra_piece *pieces, int64_t count,
                            int64_t *total)
{
    *total = 0;
    for (int64_t i = 0; i < count; i++) {
        *total += pieces[i].count;
    }
    cover_token *tokens = NULL, *next;
    NEW(&tokens, *total);
    next = tokens;
    for (int64_t i = 0; i < count; i++) {
        const ra_piece *p = &pieces[i];
        for (int64_t j = 0; j < p->count; j++) {
            ra_range block = {0, 0};
            if (cover->mask.vision != RA_VISION_OFF) {
                block = ra_tokens_block(cover->tokens, p->row, p->pos + j);
            }
            int32_t group = block.begin < block.end ? (int32_t)block.begin : -1;
            *next++ = (cover_token){
                {p->pos + j, p->doc, group}, p->row, p->tensor_row, p->index + j, p->source};
        }
    }
    return tokens;
}

static void fill_rows(rng *r, const ra_tensor *t, int64_t heads, const cover_token *token)
{
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t d = 0; d < t->size[RA_CHAN]; d++) {
            ra_tensor_set(t, token->tensor_row, h, token->index, d, rng_normal(r));
        }
    }
}

static void read_row(const ra_tensor *t, const cover_token *token, int64_t head, double *out)
{
    for (int64_t d = 0; d < t->size[RA_CHAN]; d++) {
        out[d] = ra_tensor_get(t, token->tensor_row, head, token->index, d);
    }
}

/* ---- the answer */

static double dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static void add_scaled(double *to, double factor, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        to[i] += factor * from[i];
    }
}

static bool sees(const cover_case *c, const cover_token *q, const cover_token *k)
{
    return q->row == k->row && ra_mask_rule(&c->cover.mask, q->token, k->token);
}

/* The gradients once more, every operation rounded to f32. */
typedef struct plain_sums {
    float *dq, *dk, *dv; /* as the answer's */
} plain_sums;

static float dot_f32(const double *a, const double *b, int64_t count)
{
    float sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += (float)a[i] * (float)b[i];
    }
    return sum;
}

static void add_scaled_f32(float *to, float factor, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        to[i] += factor * (float)from[i];
    }
}

/* One query row, and the keys that it sees: those with a weight. */
static void plain_row(const cover_case *c, int64_t at, const double *q, const double *dout,
                      const double *k, const double *v, const double *p, float delta,
                      plain_sums *to)
{
    int64_t chan = c->chan, kv = at % c->q_heads / (c->q_heads / c->kv_heads);
    for (int64_t j = 0; j < c->k_total; j++) {
        int64_t row = (j * c->kv_heads + kv) * chan;
        if (p[j] > 0) {
            float weight = expf(c->scale * dot_f32(q, k + row, chan) - (float)c->lse_want[at]);
            float ds = weight * (dot_f32(dout, v + row, chan) - delta) * c->scale;
            add_scaled_f32(to->dq + at * chan, ds, k + row, chan);
            add_scaled_f32(to->dk + row, ds, q, chan);
            add_scaled_f32(to->dv + row, weight, dout, chan);
        }
    }
}

static double largest_error(const float *plain, const double *answer, int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)plain[i] - answer[i]));
    }
    return largest;
}

/* One query row: p is scratch for [k_total], k and v are [k_total, kv_heads, chan]. */
static void answer_row(cover_case *c, int64_t i, int64_t head, const double *k, const double *v,
                       double *p, plain_sums *plain)
{
    int64_t chan = c->chan, at = i * c->q_heads + head, kv = head / (c->q_heads / c->kv_heads);
    const cover_token *token = &c->q_token[i];
    double q[RA_HEAD_DIM_MAX], dout[RA_HEAD_DIM_MAX], max = -INFINITY, sum = 0;
    read_row(&c->q, token, head, q);
    read_row(&c->dout, token, head, dout);
    for (int64_t j = 0; j < c->k_total; j++) {
        p[j] = -INFINITY;
        if (sees(c, token, &c->k_token[j])) {
            p[j] = (double)c->scale * dot(q, k + (j * c->kv_heads + kv) * chan, chan);
            max = fmax(max, p[j]);
        }
    }
    for (int64_t j = 0; j < c->k_total && max > -INFINITY; j++) {
        sum += exp(p[j] - max);
    }
    c->lse_want[at] = max + log(sum);
    double *out = c->out + at * chan;
    for (int64_t j = 0; j < c->k_total; j++) {
        p[j] = max > -INFINITY ? exp(p[j] - c->lse_want[at]) : 0;
        add_scaled(out, p[j], v + (j * c->kv_heads + kv) * chan, chan);
    }
    double delta = dot(out, dout, chan);
    for (int64_t j = 0; j < c->k_total; j++) {
        int64_t row = (j * c->kv_heads + kv) * chan;
        double ds = p[j] * (dot(dout, v + row, chan) - delta) * (double)c->scale;
        add_scaled(c->dq + at * chan, ds, k + row, chan);
        add_scaled(c->dk + row, ds, q, chan);
        add_scaled(c->dv + row, p[j], dout, chan);
    }
    plain_row(c, at, q, dout, k, v, p, (float)delta, plain);
    ra_tensor_set(&c->lse, token->tensor_row, head, token->index, 0, c->lse_want[at]);
    bool empty = max == -INFINITY; /* then nothing else of the row may be read */
    ra_tensor_set(&c->delta, token->tensor_row, head, token->index, 0, empty ? NAN : delta);
    for (int64_t d = 0; d < chan && empty; d++) {
        ra_tensor_set(&c->q, token->tensor_row, head, token->index, d, NAN);
        ra_tensor_set(&c->dout, token->tensor_row, head, token->index, d, NAN);
    }
}

static void answer(cover_case *c)
{
    double *k = NULL, *v = NULL, *p = NULL;
    plain_sums plain = {0};
    int64_t q_rows = c->q_total * c->q_heads, k_rows = c->k_total * c->kv_heads;
    NEW(&k, k_rows * c->chan);
    NEW(&v, k_rows * c->chan);
    NEW(&p, c->k_total);
    NEW(&c->out, q_rows * c->chan);
    NEW(&c->lse_want, q_rows);
    NEW(&c->dq, q_rows * c->chan);
    NEW(&c->dk, k_rows * c->chan);
    NEW(&c->dv, k_rows * c->chan);
    NEW(&plain.dq, q_rows * c->chan);
    NEW(&plain.dk, k_rows * c->chan);
    NEW(&plain.dv, k_rows * c->chan);
    for (int64_t j = 0; j < k_rows; j++) {
        const cover_token *token = &c->k_token[j / c->kv_heads];
        read_row(&c->k[token->source], token, j % c->kv_heads, k + j * c->chan);
        read_row(&c->v[token->source], token, j % c->kv_heads, v + j * c->chan);
    }
    for (int64_t i = 0; i < q_rows; i++) {
        answer_row(c, i / c->q_heads, i % c->q_heads, k, v, p, &plain);
    }
    c->dq_f32 = largest_error(plain.dq, c->dq, q_rows * c->chan);
    c->dk_f32 = largest_error(plain.dk, c->dk, k_rows * c->chan);
    c->dv_f32 = largest_error(plain.dv, c->dv, k_rows * c->chan);
    ra_free(plain.dq);
    ra_free(plain.dk);
    ra_free(plain.dv);
    ra_free(k);
    ra_free(v);
    ra_free(p);
}

/* Pieces are there, sources and indices too: makes tensors and the answer. own and chunk are the
 * lengths of the sequence axes. */
static void finish(rng *r, cover_case *c, cover_shape shape, int64_t rows, int64_t own,
                   int64_t chunk)
{
    c->q_heads = shape.q_heads;
    c->kv_heads = shape.kv_heads;
    c->chan = shape.chan;
    c->dtype = shape.dtype;
    c->scale = shape.scale;
    c->cover.tokens = c->tokens;
    ra_pieces_sort(c->cover.q, c->cover.q_count);
    ra_pieces_sort(c->cover.k, c->cover.k_count);
    ra_cover_link(&c->cover);
    c->q_token = flatten(&c->cover, c->cover.q, c->cover.q_count, &c->q_total);
    c->k_token = flatten(&c->cover, c->cover.k, c->cover.k_count, &c->k_total);
    bool outside = rng_chance(r, 50);
    /* Half of all cases have rows that a tensor map can describe: multiples of 16 bytes. */
    int64_t gap = rng_int(r, 0, 1) ? 8 * rng_int(r, 0, 1) : rng_int(r, 1, 3);
    int64_t hq = c->q_heads, hk = c->kv_heads;
    c->q = new_tensor(outside, gap, c->dtype, rows, hq, own, c->chan);
    c->dout = new_tensor(!outside, gap, c->dtype, rows, hq, own, c->chan);
    c->lse = new_tensor(outside, gap, RA_F32, rows, hq, own, 1);
    c->delta = new_tensor(!outside, gap, RA_F32, rows, hq, own, 1);
    c->k[RA_SOURCE_OWN] = new_tensor(outside, gap, c->dtype, rows, hk, own, c->chan);
    c->v[RA_SOURCE_OWN] = new_tensor(!outside, gap, c->dtype, rows, hk, own, c->chan);
    c->k[RA_SOURCE_CHUNK] = new_tensor(outside, 0, c->dtype, 1, hk, chunk, c->chan);
    c->v[RA_SOURCE_CHUNK] = new_tensor(!outside, 0, c->dtype, 1, hk, chunk, c->chan);
    for (int64_t i = 0; i < c->q_total; i++) {
        fill_rows(r, &c->q, hq, &c->q_token[i]);
        fill_rows(r, &c->dout, hq, &c->q_token[i]);
    }
    for (int64_t j = 0; j < c->k_total; j++) {
        fill_rows(r, &c->k[c->k_token[j].source], hk, &c->k_token[j]);
        fill_rows(r, &c->v[c->k_token[j].source], hk, &c->k_token[j]);
    }
    answer(c);
}

/* ---- cases */

static ra_mask random_mask_of(rng *r, int64_t seq)
{
    static const ra_vision visions[] = {RA_VISION_OFF, RA_VISION_OVER_WINDOW,
                                        RA_VISION_WITHIN_WINDOW};
    ra_mask mask = {.causal = rng_chance(r, 60)};
    if (rng_chance(r, 60)) {
        mask.window = rng_int(r, 1, seq + 2);
        mask.vision = visions[rng_int(r, 0, 2)];
    }
    if (rng_chance(r, 30)) {
        mask.window_right = rng_int(r, 1, seq);
    }
    return mask;
}

/* Cuts [pos, pos + count) of one document at random; leaves some pieces out. Chunk rows are taken
 * from *chunk on, with gaps. */
static void cut(rng *r, ra_piece piece, bool keys, int64_t *chunk, ra_piece *out, int64_t *count)
{
    int64_t end = piece.pos + piece.count;
    int64_t longest = rng_chance(r, 50) ? piece.count : rng_int(r, 1, piece.count);
    while (piece.pos < end) {
        ra_piece p = piece;
        p.count = ra_min_i64(rng_int(r, (longest + 1) / 2, longest), end - piece.pos);
        if (keys && rng_chance(r, 40)) {
            p.source = RA_SOURCE_CHUNK;
            p.tensor_row = 0;
            p.index = *chunk + rng_int(r, 0, 1);
            *chunk = p.index + p.count;
        }
        if (!rng_chance(r, 10)) {
            out[(*count)++] = p;
        }
        piece.pos += p.count;
        piece.index += p.count;
    }
}

static void random_row(rng *r, cover_case *c, int64_t row, int64_t seq, int64_t shift,
                       int64_t *chunk)
{
    for (int64_t pos = 0; pos < seq;) {
        int64_t count = ra_min_i64(rng_int(r, 1, seq), seq - pos);
        int32_t doc = (int32_t)rng_int(r, 0, 3);
        ra_piece piece = {.row = row,
                          .pos = pos,
                          .count = count,
                          .index = pos + shift,
                          .tensor_row = row,
                          .doc = doc,
                          .fresh = true,
                          .final = true};
        if (doc > 0) {
            cut(r, piece, false, chunk, c->cover.q, &c->cover.q_count);
            cut(r, piece, true, chunk, c->cover.k, &c->cover.k_count);
        }
        pos += count;
    }
    for (int64_t pos = rng_int(r, 0, 4); pos < seq;) {
        int64_t count = ra_min_i64(rng_int(r, 1, 1 + seq / 3), seq - pos);
        c->tokens->block[c->tokens->block_count++] = (ra_range){pos, pos + count};
        pos += count + rng_int(r, 1, 1 + seq / 3);
    }
    c->tokens->block_first[row + 1] = c->tokens->block_count;
}

/* Parts of some own key pieces. */
static void add_later(rng *r, cover_case *c)
{
    int percent = (int)rng_int(r, 0, 60);
    for (int64_t i = 0; i < c->cover.k_count; i++) {
        ra_piece part = c->cover.k[i];
        if (part.source == RA_SOURCE_OWN && rng_chance(r, percent)) {
            int64_t from = rng_chance(r, 50) ? 0 : rng_int(r, 0, part.count - 1);
            part.pos += from;
            part.index += from;
            part.count = rng_int(r, 1, part.count - from);
            assert_int_equal(ra_piece_set_add(&c->later, &part, 1), RA_OK);
        }
    }
}

cover_case cover_random(rng *r, cover_shape shape, int64_t seq_max)
{
    cover_case c = {0};
    int64_t rows = rng_int(r, 1, 2), seq = rng_int(r, 1, seq_max), shift = rng_int(r, 0, 2);
    c.cover.mask = random_mask_of(r, seq);
    NEW(&c.tokens, 1);
    c.tokens->rows = rows;
    c.tokens->seq = seq;
    NEW(&c.tokens->block, rows * seq);
    NEW(&c.tokens->block_first, rows + 1);
    NEW(&c.cover.q, rows * seq);
    NEW(&c.cover.k, rows * seq);
    int64_t chunk = 0;
    for (int64_t row = 0; row < rows; row++) {
        random_row(r, &c, row, seq, shift, &chunk);
    }
    finish(r, &c, shape, rows, seq + 3, chunk);
    add_later(r, &c);
    return c;
}

cover_case cover_pair(rng *r, cover_shape shape, ra_mask mask, int64_t queries, int64_t keys)
{
    cover_case c = {.cover.mask = mask};
    int64_t end = ra_max_i64(queries, keys);
    NEW(&c.tokens, 1);
    NEW(&c.tokens->block_first, 2);
    NEW(&c.cover.q, 1);
    NEW(&c.cover.k, 1);
    c.cover.q_count = c.cover.k_count = 1;
    c.cover.q[0] = (ra_piece){.pos = end - queries, .count = queries, .doc = 7};
    c.cover.q[0].fresh = c.cover.q[0].final = true;
    c.cover.k[0] = (ra_piece){.pos = end - keys, .count = keys, .doc = 7};
    finish(r, &c, shape, 1, end, 0);
    return c;
}

void cover_case_free(cover_case *c)
{
    ra_tokens_free(c->tokens);
    ra_free(c->tokens);
    ra_cover_free(&c->cover);
    ra_piece_set_free(&c->later);
    void *owned[] = {c->q_token,   c->k_token,   c->q.data,    c->dout.data, c->k[0].data,
                     c->k[1].data, c->v[0].data, c->v[1].data, c->lse.data,  c->delta.data,
                     c->out,       c->lse_want,  c->dq,        c->dk,        c->dv};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) {
        ra_free(owned[i]);
    }
}

ra_cover cover_part(const cover_case *c, const uint8_t *keep, bool fresh, bool final)
{
    ra_cover part = {.tokens = c->tokens, .mask = c->cover.mask, .q_count = c->cover.q_count};
    NEW(&part.q, c->cover.q_count);
    NEW(&part.k, c->cover.k_count);
    for (int64_t i = 0; i < c->cover.q_count; i++) {
        part.q[i] = c->cover.q[i];
        part.q[i].fresh = fresh;
        part.q[i].final = final;
    }
    for (int64_t i = 0; i < c->cover.k_count; i++) {
        if (keep[i]) {
            part.k[part.k_count++] = c->cover.k[i];
        }
    }
    ra_cover_link(&part);
    return part;
}

void cover_passes(const cover_case *c, const uint8_t *keep, int parts, ra_cover *out)
{
    enum { PARTS_MAX = 8 };
    ra_cover *covers[PARTS_MAX];
    const ra_piece_set nothing = {0};
    uint8_t *all = NULL;
    assert_in_range(parts, 1, PARTS_MAX);
    NEW(&all, c->cover.k_count);
    for (int64_t i = 0; i < c->cover.k_count; i++) {
        all[i] = 1;
    }
    for (int part = 0; part < parts; part++) {
        out[part] = cover_part(c, keep ? keep + part * c->cover.k_count : all, false, false);
        covers[part] = &out[part];
    }
    assert_int_equal(ra_passes_mark(covers, parts, &nothing, &c->later), RA_OK);
    ra_free(all);
}

ra_cover cover_cut_queries(const cover_case *c, int64_t count)
{
    ra_cover part = {.tokens = c->tokens, .mask = c->cover.mask, .k_count = c->cover.k_count};
    NEW(&part.q, c->q_total);
    NEW(&part.k, c->cover.k_count);
    for (int64_t i = 0; i < c->cover.k_count; i++) {
        part.k[i] = c->cover.k[i];
    }
    for (int64_t i = 0; i < c->cover.q_count; i++) {
        for (int64_t at = 0; at < c->cover.q[i].count; at += count) {
            ra_piece *piece = &part.q[part.q_count++];
            *piece = c->cover.q[i];
            piece->pos += at;
            piece->index += at;
            piece->count = ra_min_i64(count, piece->count - at);
        }
    }
    ra_cover_link(&part);
    return part;
}
