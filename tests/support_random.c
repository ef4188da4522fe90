/* Random masks and metadata. */
#include "support_random.h"

#include <stdlib.h>

void random_mask(rng *r, int64_t seq, ra_layer *layer)
{
    layer->causal = rng_chance(r, 85);
    layer->window =
        rng_chance(r, 35) ? 0 : rng_int(r, 1, rng_chance(r, 70) ? 1 + seq / 3 : seq + 4);
    layer->window_right = rng_chance(r, 10) ? rng_int(r, 1, seq) : 0;
    layer->vision = (ra_vision)rng_int(r, RA_VISION_OFF, RA_VISION_WITHIN_WINDOW);
}

static int32_t random_document(rng *r)
{
    int64_t id = rng_int(r, -1, 4);
    return (int32_t)(id == 4 ? 2000000000 : id);
}

static void random_documents(rng *r, problem *p)
{
    int32_t *doc_id = malloc((size_t)(p->rows * p->seq + 1) * sizeof *doc_id);
    assert_non_null(doc_id);
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t longest = rng_chance(r, 20) ? p->seq : 1 + p->seq / rng_int(r, 1, 8);
        for (int64_t pos = 0; pos < p->seq;) {
            int64_t count = rng_int(r, 1, longest);
            int32_t id = random_document(r);
            for (; count > 0 && pos < p->seq; count--) {
                doc_id[row * p->seq + pos++] = id;
            }
        }
    }
    problem_set_docs(p, doc_id);
    free(doc_id);
}

static void random_pads(rng *r, problem *p)
{
    uint8_t *is_pad = calloc((size_t)(p->rows * p->seq + 1), 1);
    assert_non_null(is_pad);
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t kind = rng_int(r, 0, 3), cut = rng_int(r, 0, p->seq);
        for (int64_t pos = 0; pos < p->seq; pos++) {
            bool pad = kind == 0   ? pos >= cut
                       : kind == 1 ? pos < cut
                                   : kind == 2 && rng_chance(r, 20);
            is_pad[row * p->seq + pos] = pad ? (uint8_t)rng_int(r, 1, 255) : 0;
        }
    }
    problem_set_pads(p, is_pad);
    free(is_pad);
}

static void random_types(rng *r, problem *p)
{
    int32_t *token_type = calloc((size_t)(p->rows * p->seq + 1), sizeof *token_type);
    assert_non_null(token_type);
    for (int64_t i = 0;
         i < p->rows * p->seq;) { /* a block may also end one row and begin the next */
        int64_t count = rng_int(r, 1, 1 + p->seq / 2);
        int32_t type = rng_chance(r, 50) ? 0 : (int32_t)rng_int(r, -1, 3);
        for (; count > 0 && i < p->rows * p->seq; count--) {
            token_type[i++] = type;
        }
    }
    problem_set_types(p, token_type);
    free(token_type);
}

void random_metadata(rng *r, problem *p)
{
    if (rng_chance(r, 75)) {
        random_documents(r, p);
    }
    if (rng_chance(r, 30)) {
        random_pads(r, p);
    }
    if (rng_chance(r, 50)) {
        random_types(r, p);
    }
}
