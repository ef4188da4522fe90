/* The golden cases: the oracle gives what transformers' mask and float64 gave, and the ring agrees
 * for every number of ranks, layout and way to keep K/V. */
#include "support_probe.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/tensor.h"

enum { CASES_MAX = 64, EXPECTED = 5 };

/* A case file in memory. The reader trusts its files: the one that must not is
 * src/cli/safetensors.h. */
typedef struct golden {
    char name[128];
    char *header;
    unsigned char *data;
    problem p;
    const float *expected[EXPECTED]; /* out, lse, dq, dk, dv; NULL where the file has none */
} golden;

/* The text behind "name": in the header, NULL if it is not there. */
static const char *find_field(const char *text, const char *name)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", name);
    const char *at = strstr(text, quoted);
    at = at ? at + strlen(quoted) : NULL;
    while (at && *at == ' ') {
        at++;
    }
    return at;
}

static bool field_is(const golden *g, const char *name, const char *value)
{
    const char *at = find_field(g->header, name);
    assert_non_null(at);
    return at[0] == '"' && strncmp(at + 1, value, strlen(value)) == 0 &&
           at[1 + strlen(value)] == '"';
}

static double field_number(const golden *g, const char *name)
{
    const char *at = find_field(g->header, name);
    assert_non_null(at);
    return strtod(at + 1, NULL);
}

/* A tensor's bytes and shape (up to 4 sizes, the rest 1). */
static const void *find_tensor(const golden *g, const char *name, int64_t shape[4])
{
    const char *entry = find_field(g->header, name);
    if (!entry) {
        return NULL;
    }
    const char *sizes = strchr(find_field(entry, "shape"), '[') + 1;
    for (int i = 0; i < 4; i++) {
        char *end = NULL;
        shape[i] = strtoll(sizes, &end, 10);
        shape[i] = end == sizes ? 1 : shape[i];
        sizes = *end == ',' ? end + 1 : end;
    }
    return g->data + strtoll(strchr(find_field(entry, "data_offsets"), '[') + 1, NULL, 10);
}

static void fill_from(const golden *g, const char *name, const ra_tensor *t)
{
    int64_t shape[4];
    const void *data = find_tensor(g, name, shape);
    assert_non_null(data);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(shape[i], t->size[i]);
    }
    memcpy(t->data, data, (size_t)ra_tensor_count(t) * ra_dtype_bytes(t->dtype));
}

static void read_file(golden *g, const char *path)
{
    FILE *file = fopen(path, "rb");
    uint64_t length = 0;
    assert_non_null(file);
    assert_int_equal(fread(&length, sizeof length, 1, file), 1);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size_t bytes = (size_t)ftell(file) - sizeof length - (size_t)length;
    assert_int_equal(fseek(file, sizeof length, SEEK_SET), 0);
    g->header = calloc((size_t)length + 1, 1);
    g->data = malloc(bytes);
    assert_true(g->header && g->data);
    assert_int_equal(fread(g->header, (size_t)length, 1, file), 1);
    assert_int_equal(fread(g->data, bytes, 1, file), 1);
    fclose(file);
}

static void golden_open(golden *g, const char *file)
{
    static const char *const results[EXPECTED] = {"out", "lse", "grad_query", "grad_key",
                                                  "grad_value"};
    char path[1024];
    int64_t q[4], k[4], shape[4];
    memset(g, 0, sizeof *g);
    snprintf(g->name, sizeof g->name, "%.127s", file);
    snprintf(path, sizeof path, "%.800s/%.127s", RA_GOLDEN_DIR, file);
    read_file(g, path);
    assert_non_null(find_tensor(g, "query", q));
    assert_non_null(find_tensor(g, "key", k));
    const char *dtype = find_field(find_field(g->header, "query"), "dtype");
    ra_layer layer = layer_of((int)q[1], (int)k[1], (int)q[3],
                              strncmp(dtype, "\"BF16\"", 6) == 0  ? RA_BF16
                              : strncmp(dtype, "\"F16\"", 5) == 0 ? RA_F16
                                                                  : RA_F32);
    layer.causal = field_is(g, "causal", "true");
    layer.scale = (float)field_number(g, "scale");
    layer.window = (int64_t)field_number(g, "sliding_window");
    layer.vision = field_is(g, "vision_rule", "over_window")     ? RA_VISION_OVER_WINDOW
                   : field_is(g, "vision_rule", "within_window") ? RA_VISION_WITHIN_WINDOW
                                                                 : RA_VISION_OFF;
    problem_create(&g->p, layer, q[0], q[2]);
    fill_from(g, "query", &g->p.q);
    fill_from(g, "key", &g->p.k);
    fill_from(g, "value", &g->p.v);
    fill_from(g, "grad_out", &g->p.dout);
    const void *ids = find_tensor(g, "packed_seq_ids", shape);
    const void *pads = find_tensor(g, "padding_mask", shape);
    const void *types = find_tensor(g, "mm_token_type_ids", shape);
    if (ids) {
        problem_set_docs(&g->p, ids);
    }
    if (pads) {
        problem_set_pads(&g->p, pads);
    }
    if (types) {
        problem_set_types(&g->p, types);
    }
    for (int i = 0; i < EXPECTED; i++) {
        g->expected[i] = find_tensor(g, results[i], shape);
    }
}

static void golden_free(golden *g)
{
    problem_free(&g->p);
    free(g->header);
    free(g->data);
}

/* The oracle within 1e-5 of each tensor's largest value; returns how many tensors were compared. */
static int check_oracle(const golden *g, const reference *ref)
{
    const answer *a = &ref->oracle;
    const ra_tensor *oracle[EXPECTED] = {&a->out, &a->lse, &a->dq, &a->dk, &a->dv};
    int compared = 0;
    for (int i = 0; i < EXPECTED; i++) {
        if (!g->expected[i]) {
            continue;
        }
        double largest = 0, error = 0;
        const double *truth = oracle[i]->data;
        for (int64_t j = 0; j < ra_tensor_count(oracle[i]); j++) {
            double want = (double)g->expected[i][j];
            if (isinf(want) || isinf(truth[j])) {
                assert_true(want == truth[j]);
                continue;
            }
            largest = fabs(want) > largest ? fabs(want) : largest;
            error = fabs(want - truth[j]) > error ? fabs(want - truth[j]) : error;
        }
        if (!(error <= 1e-5 * largest)) {
            fail_msg("%s: tensor %d: oracle off by %.3g of %.3g", g->name, i, error, largest);
        }
        compared++;
    }
    return compared;
}

static void check_ring(const golden *g, const reference *ref)
{
    static const int ranks[] = {1, 2, 3, 4, 7};
    rng r = rng_of(support_seed());
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        for (int kind = 0; kind < LAYOUT_KINDS; kind++) {
            layout l = layout_kind(kind, ranks[i], g->p.seq, &r);
            for (int keep = 0; keep < 2; keep++) {
                world_options o = {.ctx = {.keep_kv = keep == 1}};
                answer a;
                support_limit(60, "%s, %d ranks, %s, keep %d", g->name, ranks[i], l.name, keep);
                world_run(&g->p, &l, &o, &a, NULL);
                reference_check(ref, &g->p, &a, true);
                answer_free(&a, false);
            }
        }
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static void every_case(void **state)
{
    (void)state;
    static char names[CASES_MAX][128];
    int count = 0, compared = 0;
    DIR *dir = opendir(RA_GOLDEN_DIR);
    assert_non_null(dir);
    for (struct dirent *entry = readdir(dir); entry && count < CASES_MAX; entry = readdir(dir)) {
        if (strstr(entry->d_name, ".safetensors")) {
            snprintf(names[count++], sizeof names[0], "%.127s", entry->d_name);
        }
    }
    closedir(dir);
    assert_true(count >= 18);
    qsort(names, (size_t)count, sizeof names[0], by_name);
    for (int i = 0; i < count; i++) {
        golden g;
        reference ref;
        support_limit(120, "%s", names[i]);
        golden_open(&g, names[i]);
        reference_create(&ref, &g.p);
        int tensors = check_oracle(&g, &ref);
        assert_true(tensors >= 1);
        compared += tensors;
        check_ring(&g, &ref);
        reference_free(&ref);
        golden_free(&g);
    }
    printf("%d cases, %d expected tensors\n", count, compared);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_case)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
