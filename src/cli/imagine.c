/*
 * The case of `plan --seq`: documents and images from the command line become the metadata of one
 * row. No tensors exist, so a million tokens cost a few megabytes. Must not know ranks.
 */
#include <string.h>

#include "base/alloc.h"
#include "cli/case.h"
#include "cli/files.h"

/* One length a line; blank lines are skipped. */
static ra_status read_lengths(const char *path, ra_run **out, int64_t *count)
{
    char *text = NULL;
    size_t bytes = 0;
    int64_t capacity = 0;
    RA_TRY(ra_text_file_read(path, &text, &bytes));
    ra_status status = RA_OK;
    if (strlen(text) != bytes) {
        status = RA_FAIL(RA_E_IO, "%s: a 0 byte, expected one length a line", path);
    }
    char *rest = text, *line;
    while (!status && (line = strsep(&rest, "\n"))) {
        line[strcspn(line, "\r")] = 0;
        if (!*line) {
            continue;
        }
        status = RA_RESERVE(out, &capacity, *count + 1);
        if (!status) {
            status = ra_number_parse("--docs line", line, 1, INT32_MAX, &(*out)[*count].count);
            *count += 1;
        }
    }
    ra_free(text);
    return status;
}

static ra_status lay_documents(const char *text, ra_case *c)
{
    ra_run *docs = NULL;
    int64_t count = 0, begin = 0;
    ra_status status;
    if (text[strspn(text, "0123456789,")]) {
        status = read_lengths(text, &docs, &count);
        if (status == RA_E_IO) {
            status = RA_FAIL(RA_E_IO, "--docs: %s", ra_last_error());
        }
    } else {
        int listed = 0;
        status = ra_pairs_parse("--docs", text, 0, &docs, &listed);
        count = listed;
    }
    if (status || (status = RA_NEW(&c->doc_id, c->seq))) {
        goto done;
    }
    for (int64_t doc = 0; doc < count && !status; doc++) {
        int64_t length = docs[doc].count;
        if (length > c->seq - begin) {
            status = RA_FAIL(RA_E_ARG, "--docs: document %lld ends at position %lld, --seq is %lld",
                             (long long)doc + 1, (long long)(begin + length), (long long)c->seq);
            break;
        }
        for (int64_t i = 0; i < length; i++) {
            c->doc_id[begin + i] = (int32_t)doc + 1;
        }
        begin += length;
    }
done:
    ra_free(docs);
    return status;
}

static ra_status lay_images(const char *text, ra_case *c)
{
    ra_run *images = NULL;
    int count = 0;
    ra_status status = ra_pairs_parse("--images", text, ':', &images, &count);
    if (!status) {
        status = RA_NEW(&c->token_type, c->seq);
    }
    for (int i = 0; i < count && !status; i++) {
        if (images[i].start + images[i].count > c->seq) {
            status =
                RA_FAIL(RA_E_ARG, "--images: %lld:%lld, expected to end within --seq %lld",
                        (long long)images[i].start, (long long)images[i].count, (long long)c->seq);
            break;
        }
        for (int64_t p = 0; p < images[i].count; p++) {
            c->token_type[images[i].start + p] = 1;
        }
    }
    ra_free(images);
    return status;
}

ra_status ra_case_imagine(const ra_args *args, ra_case *out)
{
    bool sliding = args->window > 0;
    *out = (ra_case){.path = "", .name = "plan", .rows = 1, .seq = args->seq};
    /* The defaults are the two layer kinds of Gemma 4. */
    out->layer = (ra_layer){
        .size = sizeof out->layer,
        .q_heads = args->q_heads ? args->q_heads : 8,
        .kv_heads = args->kv_heads ? args->kv_heads : (sliding ? 4 : 1),
        .head_dim = args->head_dim ? args->head_dim : (sliding ? 256 : 512),
        .dtype = args->dtype ? args->dtype : RA_BF16,
        .scale = 1.0f,
        .causal = true,
        .window = args->window,
        .vision = args->vision,
    };
    ra_status status = args->docs ? lay_documents(args->docs, out) : RA_OK;
    if (!status && args->images) {
        status = lay_images(args->images, out);
    }
    if (status) {
        ra_case_free(out);
    }
    return status;
}
