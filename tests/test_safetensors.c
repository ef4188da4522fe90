/* The safetensors reader and writer: what is refused, with which words, and what comes back. */
#include "support.h"

#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/alloc.h"
#include "cli/safetensors.h"

/* A file in memory: length, header, `body` bytes of 0, 1, 2, ... Free it with free. */
static unsigned char *make_file(const char *header, size_t body, size_t *bytes)
{
    size_t header_bytes = strlen(header);
    *bytes = 8 + header_bytes + body;
    unsigned char *file = malloc(*bytes);
    assert_non_null(file);
    for (int i = 0; i < 8; i++) {
        file[i] = (unsigned char)(header_bytes >> (8 * i));
    }
    memcpy(file + 8, header, header_bytes);
    for (size_t i = 0; i < body; i++) {
        file[8 + header_bytes + i] = (unsigned char)i;
    }
    return file;
}

static void accepts_a_file(void **state)
{
    (void)state;
    size_t bytes;
    ra_safetensors file;
    unsigned char *data =
        make_file("{\"__metadata__\":{\"scale\":\"1.0\"},"
                  "\"b\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[3,11]},"
                  "\"a\":{\"dtype\":\"U8\",\"shape\":[1,3],\"data_offsets\":[0,3]},"
                  "\"e\":{\"dtype\":\"F32\",\"shape\":[2,0],\"data_offsets\":[11,11]},"
                  "\"s\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[11,13]}}",
                  13, &bytes);
    assert_int_equal(ra_safetensors_parse(data, bytes, &file), RA_OK);
    assert_int_equal(file.tensor_count, 4);
    assert_string_equal(ra_safetensors_meta(&file, "scale"), "1.0");
    assert_null(ra_safetensors_meta(&file, "name"));
    assert_null(ra_safetensors_find(&file, "c"));
    const ra_st_tensor *a = ra_safetensors_find(&file, "a"), *b = ra_safetensors_find(&file, "b");
    assert_int_equal(a->dims, 2);
    assert_int_equal(a->shape[1], 3);
    assert_int_equal(((const unsigned char *)a->data)[2], 2);
    /* b lies at an odd address and was copied to an aligned one. */
    assert_int_equal((uintptr_t)b->data % 8, 0);
    assert_int_equal(*(const int64_t *)b->data, 0x0a09080706050403);
    assert_int_equal(ra_safetensors_find(&file, "e")->bytes, 0);
    assert_int_equal(ra_safetensors_find(&file, "s")->dims, 0);
    ra_safetensors_free(&file);
    free(data);
}

#define TENSOR(name, dtype, shape, begin, end)                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end   \
    "]}"

static void refuses_each_fault(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t body;
        const char *word; /* of the message */
    } cases[] = {
        {"", 0, "JSON object"},
        {" {}", 0, "JSON object"},
        {"[]", 0, "JSON object"},
        {"{", 0, "header"},
        {"{} x", 0, "header"},
        {"{}", 1, "cover 0"},
        {"{\"a\":1}", 0, "expected an object"},
        {"{" TENSOR("a", "F31", "[1]", "0", "4") "}", 4, "F31"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype missing"},
        {"{" TENSOR("a", "F32", "1", "0", "4") "}", 4, "shape"},
        {"{" TENSOR("a", "F32", "[1.0]", "0", "4") "}", 4, "shape[0]"},
        {"{" TENSOR("a", "F32", "[-1]", "0", "4") "}", 4, "shape[0]"},
        {"{" TENSOR("a", "U8", "[1,1,1,1,1,1,1,1,1]", "0", "1") "}", 1, "at most 8"},
        {"{" TENSOR("a", "F32", "[4294967296,4294967296]", "0", "0") "}", 0, "2^63"},
        {"{" TENSOR("a", "F32", "[9223372036854775808]", "0", "0") "}", 0, "header"},
        {"{" TENSOR("a", "F32", "[1]", "0", "3") "}", 3, "need 4"},
        {"{" TENSOR("a", "F32", "[1]", "0", "8") "}", 4, "lie in"},
        {"{" TENSOR("a", "F32", "[1]", "-4", "0") "}", 4, "lie in"},
        {"{" TENSOR("a", "F32", "[1]", "4", "0") "}", 4, "lie in"},
        {"{" TENSOR("a", "F32", "[1]", "0", "4.0") "}", 4, "two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4, "two integers"},
        {"{" TENSOR("a", "U8", "[4]", "0", "4") "," TENSOR("b", "U8", "[4]", "2", "6") "}", 6,
         "overlap"},
        {"{" TENSOR("a", "U8", "[1]", "0", "1") "," TENSOR("b", "U8", "[1]", "2", "3") "}", 3,
         "no tensor"},
        {"{" TENSOR("a", "U8", "[1]", "1", "2") "}", 2, "no tensor"},
        {"{" TENSOR("a", "U8", "[1]", "0", "1") "}", 2, "cover 1"},
        {"{" TENSOR("a", "U8", "[0]", "0", "0") "," TENSOR("a", "U8", "[0]", "0", "0") "}", 0,
         "duplicate"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, "__metadata__"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes;
        ra_safetensors file;
        unsigned char *data = make_file(cases[i].header, cases[i].body, &bytes);
        ra_status status = ra_safetensors_parse(data, bytes, &file);
        if (status != RA_E_IO || !strstr(ra_last_error(), cases[i].word)) {
            fail_msg("%s: status %d, message \"%s\", expected RA_E_IO with \"%s\"", cases[i].header,
                     status, ra_last_error(), cases[i].word);
        }
        assert_null(file.header);
        free(data);
    }
}

static void refuses_depth_bombs(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    char *header = malloc(DEPTH + 6);
    assert_non_null(header);
    memcpy(header, "{\"a\":", 5);
    memset(header + 5, '[', DEPTH);
    header[DEPTH + 5] = 0;
    size_t bytes;
    ra_safetensors file;
    unsigned char *data = make_file(header, 0, &bytes);
    assert_int_equal(ra_safetensors_parse(data, bytes, &file), RA_E_IO);
    assert_non_null(strstr(ra_last_error(), "depth"));
    free(data);
    free(header);
}

/* Every beginning of a good file is refused, none is read past. */
static void refuses_every_truncation(void **state)
{
    (void)state;
    size_t bytes;
    ra_safetensors file;
    unsigned char *data = make_file("{" TENSOR("a", "F32", "[2]", "0", "8") "}", 8, &bytes);
    for (size_t cut = 0; cut < bytes; cut++) {
        unsigned char *part = malloc(cut + 1);
        assert_non_null(part);
        memcpy(part, data, cut);
        unsigned char *exact = realloc(part, cut ? cut : 1);
        assert_non_null(exact);
        assert_int_equal(ra_safetensors_parse(exact, cut, &file), RA_E_IO);
        free(exact);
    }
    data[7] = 0x80; /* a length of 2^63 and a little */
    assert_int_equal(ra_safetensors_parse(data, bytes, &file), RA_E_IO);
    assert_non_null(strstr(ra_last_error(), "header length"));
    data[7] = 0;
    data[3] = 0x10; /* more than 100 MB */
    assert_int_equal(ra_safetensors_parse(data, bytes, &file), RA_E_IO);
    assert_non_null(strstr(ra_last_error(), "at most 100000000"));
    free(data);
}

static void survives_failed_allocations(void **state)
{
    (void)state;
    size_t bytes;
    ra_safetensors file;
    unsigned char *data =
        make_file("{\"__metadata__\":{\"k\":\"v\"}," TENSOR("a", "U8", "[1]", "0", "1") "," TENSOR(
                      "b", "I32", "[1]", "1", "5") "}",
                  5, &bytes);
    int failures = 0;
    for (long n = 1; n < 100; n++) {
        ra_alloc_probe probe = {0};
        atomic_store(&probe.fail_at, n);
        ra_alloc_probe *before = ra_alloc_watch(&probe);
        ra_status status = ra_safetensors_parse(data, bytes, &file);
        if (status == RA_OK) {
            ra_safetensors_free(&file);
        }
        ra_alloc_watch(before);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
        if (status == RA_OK) {
            break;
        }
        assert_int_equal(status, RA_E_NOMEM);
        failures++;
    }
    assert_in_range(failures, 4, 90);
    free(data);
}

static int count_files(const char *folder)
{
    char pattern[256];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/*", folder);
    int count = glob(pattern, 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
    globfree(&found);
    return count;
}

static void writes_what_it_reads(void **state)
{
    (void)state;
    char folder[] = "/tmp/ra_safetensors_XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/file", folder);
    const float numbers[] = {1.0f, -2.5f, 3.0f};
    const uint16_t halves[] = {0x3f80, 0xc000};
    const ra_st_tensor tensor[] = {
        {.name = "z", .dtype = RA_ST_BF16, .dims = 2, .shape = {1, 2}, .data = halves, .bytes = 4},
        {.name = "a", .dtype = RA_ST_F32, .dims = 1, .shape = {3}, .data = numbers, .bytes = 12},
        {.name = "empty", .dtype = RA_ST_F32, .dims = 2, .shape = {0, 3}},
    };
    const ra_st_meta meta[] = {{"scale", "1.0"}, {"name", "a \"quoted\" näme"}};
    for (int round = 0; round < 2; round++) { /* the second round replaces the file */
        assert_int_equal(ra_safetensors_write(path, tensor, 3, meta, 2), RA_OK);
        ra_safetensors file;
        assert_int_equal(ra_safetensors_read(path, &file), RA_OK);
        assert_int_equal(file.tensor_count, 3);
        assert_string_equal(file.tensor[0].name, "a");
        assert_memory_equal(file.tensor[0].data, numbers, sizeof numbers);
        assert_memory_equal(ra_safetensors_find(&file, "z")->data, halves, sizeof halves);
        assert_int_equal(ra_safetensors_find(&file, "z")->shape[1], 2);
        assert_string_equal(ra_safetensors_meta(&file, "name"), meta[1].value);
        ra_safetensors_free(&file);
        assert_int_equal(count_files(folder), 1);
    }
    unsigned char length[8];
    int fd = open(path, O_RDONLY);
    assert_int_equal(read(fd, length, 8), 8);
    assert_int_equal(length[0] % 8, 0);
    close(fd);
    unlink(path);
    rmdir(folder);
}

static void leaves_nothing_half_written(void **state)
{
    (void)state;
    char folder[] = "/tmp/ra_safetensors_XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    ra_safetensors file;
    const ra_st_tensor tensor = {
        .name = "a", .dtype = RA_ST_U8, .dims = 1, .shape = {1}, .data = "x", .bytes = 1};
    snprintf(path, sizeof path, "%s/none/file", folder);
    assert_int_equal(ra_safetensors_write(path, &tensor, 1, NULL, 0), RA_E_IO);
    assert_non_null(strstr(ra_last_error(), path));
    assert_int_equal(ra_safetensors_write(folder, &tensor, 1, NULL, 0), RA_E_IO);
    assert_int_equal(ra_safetensors_write("/dev/null", &tensor, 1, NULL, 0), RA_E_IO);
    assert_int_equal(count_files(folder), 0);
    /* A limit on file sizes stands for a disk that fills half way. */
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){.rlim_cur = 16, .rlim_max = before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    snprintf(path, sizeof path, "%s/file", folder);
    ra_status status = ra_safetensors_write(path, &tensor, 1, NULL, 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(status, RA_E_IO);
    assert_int_equal(count_files(folder), 0);
    assert_int_equal(ra_safetensors_read(path, &file), RA_E_IO);
    assert_int_equal(ra_safetensors_read(folder, &file), RA_E_IO);
    assert_non_null(strstr(ra_last_error(), "regular"));
    rmdir(folder);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_a_file),
        cmocka_unit_test(refuses_each_fault),
        cmocka_unit_test(refuses_depth_bombs),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(survives_failed_allocations),
        cmocka_unit_test(writes_what_it_reads),
        cmocka_unit_test(leaves_nothing_half_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
