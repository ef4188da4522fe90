/*
 * The reader: 8 bytes of length, a JSON header, then the tensors' bytes without gap or overlap. The
 * header is checked against the size of the file alone, so that a file is refused before its data
 * is read. Must not read past the bytes it was given, whatever they say.
 */
#include "cli/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "cli/files.h"

enum { LENGTH_BYTES = 8 };

static const struct {
    const char *name;
    size_t bytes;
} dtypes[RA_ST_DTYPE_COUNT] = {
#define DTYPE_ROW(name, bytes) {#name, bytes},
    RA_ST_DTYPE_LIST(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *ra_st_dtype_name(ra_st_dtype dtype)
{
    return dtype < RA_ST_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

size_t ra_st_dtype_bytes(ra_st_dtype dtype)
{
    return dtype < RA_ST_DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

/* Where a tensor's bytes lie, counted from the end of the header. */
typedef struct span {
    ra_st_tensor tensor;
    int64_t begin, end;
} span;

static ra_status parse_dtype(const char *name, const json_t *value, ra_st_dtype *out)
{
    const char *text = json_string_value(value);
    if (!text) {
        return RA_FAIL(RA_E_IO, "tensor %.64s: dtype missing, expected a string", name);
    }
    for (int i = 0; i < RA_ST_DTYPE_COUNT; i++) {
        if (strcmp(text, dtypes[i].name) == 0) {
            *out = (ra_st_dtype)i;
            return RA_OK;
        }
    }
    return RA_FAIL(RA_E_IO, "tensor %.64s: dtype %.32s, expected BOOL, U8 .. I64, F16, BF16 .. F64",
                   name, text);
}

/* The shape, and the bytes that it and the dtype ask for. */
static ra_status parse_shape(const char *name, const json_t *value, ra_st_tensor *tensor)
{
    if (!json_is_array(value) || json_array_size(value) > RA_ST_DIMS_MAX) {
        return RA_FAIL(RA_E_IO, "tensor %.64s: shape, expected a list of at most %d sizes", name,
                       RA_ST_DIMS_MAX);
    }
    int64_t bytes = (int64_t)dtypes[tensor->dtype].bytes;
    tensor->dims = (int)json_array_size(value);
    for (int i = 0; i < tensor->dims; i++) {
        const json_t *item = json_array_get(value, (size_t)i);
        int64_t size = json_integer_value(item);
        if (!json_is_integer(item) || size < 0) {
            return RA_FAIL(RA_E_IO, "tensor %.64s: shape[%d], expected an integer of 0 or more",
                           name, i);
        }
        if (__builtin_mul_overflow(bytes, size, &bytes)) {
            return RA_FAIL(RA_E_IO, "tensor %.64s: shape[%d] %lld, more bytes than 2^63", name, i,
                           (long long)size);
        }
        tensor->shape[i] = size;
    }
    tensor->bytes = (size_t)bytes;
    return RA_OK;
}

static ra_status parse_tensor(const char *name, const json_t *value, int64_t data_bytes, span *out)
{
    if (!json_is_object(value)) {
        return RA_FAIL(RA_E_IO, "tensor %.64s: expected an object", name);
    }
    out->tensor.name = name;
    RA_TRY(parse_dtype(name, json_object_get(value, "dtype"), &out->tensor.dtype));
    RA_TRY(parse_shape(name, json_object_get(value, "shape"), &out->tensor));
    const json_t *offsets = json_object_get(value, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *second = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second)) {
        return RA_FAIL(RA_E_IO, "tensor %.64s: data_offsets, expected two integers", name);
    }
    out->begin = json_integer_value(first);
    out->end = json_integer_value(second);
    if (out->begin < 0 || out->end < out->begin || out->end > data_bytes) {
        return RA_FAIL(RA_E_IO,
                       "tensor %.64s: data_offsets [%lld, %lld], expected to lie in the %lld bytes "
                       "after the header",
                       name, (long long)out->begin, (long long)out->end, (long long)data_bytes);
    }
    if ((uint64_t)(out->end - out->begin) != out->tensor.bytes) {
        return RA_FAIL(RA_E_IO,
                       "tensor %.64s: %lld bytes at its data_offsets, its shape and dtype need %zu",
                       name, (long long)(out->end - out->begin), out->tensor.bytes);
    }
    return RA_OK;
}

static int compare_spans(const void *left, const void *right)
{
    const span *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return (a->end > b->end) - (a->end < b->end);
}

/* The format wants every byte after the header in exactly one tensor. */
static ra_status check_coverage(span *spans, int64_t count, int64_t data_bytes)
{
    int64_t covered = 0;
    if (count > 0) {
        qsort(spans, (size_t)count, sizeof *spans, compare_spans);
    }
    for (int64_t i = 0; i < count; i++) {
        if (spans[i].begin != covered) {
            return RA_FAIL(RA_E_IO, "tensor %.64s: begins at byte %lld, expected %lld (%s)",
                           spans[i].tensor.name, (long long)spans[i].begin, (long long)covered,
                           spans[i].begin < covered ? "tensors overlap" : "bytes in no tensor");
        }
        covered = spans[i].end;
    }
    if (covered != data_bytes) {
        return RA_FAIL(RA_E_IO, "%lld bytes after the header, the tensors cover %lld",
                       (long long)data_bytes, (long long)covered);
    }
    return RA_OK;
}

static ra_status parse_meta(json_t *value, ra_safetensors *out)
{
    if (!json_is_object(value)) {
        return RA_FAIL(RA_E_IO, "__metadata__: expected an object");
    }
    RA_TRY(RA_NEW(&out->meta, json_object_size(value)));
    const char *key;
    json_t *item;
    json_object_foreach(value, key, item)
    {
        if (!json_is_string(item)) {
            return RA_FAIL(RA_E_IO, "__metadata__: value of %.64s, expected a string", key);
        }
        out->meta[out->meta_count++] = (ra_st_meta){key, json_string_value(item)};
    }
    return RA_OK;
}

/* Everything but the data: out->tensor[i].data stays NULL, begin[i] says where it lies. */
static ra_status parse_entries(json_t *root, int64_t data_bytes, ra_safetensors *out,
                               int64_t **begin)
{
    span *spans = NULL;
    int64_t count = 0;
    const char *key;
    json_t *item;
    ra_status status = RA_NEW(&spans, json_object_size(root));
    if (status) {
        return status;
    }
    json_object_foreach(root, key, item)
    {
        status = strcmp(key, "__metadata__") == 0
                     ? parse_meta(item, out)
                     : parse_tensor(key, item, data_bytes, &spans[count++]);
        if (status) {
            goto done;
        }
    }
    if ((status = check_coverage(spans, count, data_bytes)) ||
        (status = RA_NEW(&out->tensor, count)) || (status = RA_NEW(&out->copy, count)) ||
        (status = RA_NEW(begin, count))) {
        goto done;
    }
    out->tensor_count = count;
    for (int64_t i = 0; i < count; i++) {
        out->tensor[i] = spans[i].tensor;
        (*begin)[i] = spans[i].begin;
    }
done:
    ra_free(spans);
    return status;
}

static ra_status parse_header(const char *header, size_t header_bytes, int64_t data_bytes,
                              ra_safetensors *out, int64_t **begin)
{
    if (header_bytes == 0 || header[0] != '{') {
        return RA_FAIL(RA_E_IO, "header: expected a JSON object at byte %d", LENGTH_BYTES);
    }
    json_error_t error;
    json_t *root = json_loadb(header, header_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        return json_error_code(&error) == json_error_out_of_memory
                   ? RA_FAIL(RA_E_NOMEM, "header of %zu bytes: allocation failed", header_bytes)
                   : RA_FAIL(RA_E_IO, "header: %s (byte %d)", error.text, error.position);
    }
    out->header = root;
    return parse_entries(root, data_bytes, out, begin);
}

/* Points the tensors into the bytes after the header. */
static ra_status bind_data(const char *data, const int64_t *begin, ra_safetensors *out)
{
    for (int64_t i = 0; i < out->tensor_count; i++) {
        ra_st_tensor *tensor = &out->tensor[i];
        if (tensor->bytes == 0) {
            continue;
        }
        tensor->data = data + begin[i];
        if ((uintptr_t)tensor->data % dtypes[tensor->dtype].bytes != 0) {
            RA_TRY(ra_alloc(tensor->bytes, 1, &out->copy[i]));
            memcpy(out->copy[i], tensor->data, tensor->bytes);
            tensor->data = out->copy[i];
        }
    }
    return RA_OK;
}

static ra_status check_length(const unsigned char *length, uint64_t file_bytes, uint64_t *out)
{
    uint64_t value = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) {
        value = value << 8 | length[i];
    }
    if (value > RA_ST_HEADER_BYTES_MAX) {
        return RA_FAIL(RA_E_IO, "header length: %llu bytes, expected at most %d",
                       (unsigned long long)value, RA_ST_HEADER_BYTES_MAX);
    }
    if (value > file_bytes - LENGTH_BYTES) {
        return RA_FAIL(RA_E_IO, "header length: %llu bytes, the file has %llu in all",
                       (unsigned long long)value, (unsigned long long)file_bytes);
    }
    *out = value;
    return RA_OK;
}

static ra_status check_file_bytes(uint64_t bytes)
{
    if (bytes < LENGTH_BYTES || bytes > INT64_MAX) {
        return RA_FAIL(RA_E_IO, "file of %llu bytes, expected at least %d",
                       (unsigned long long)bytes, LENGTH_BYTES);
    }
    return RA_OK;
}

ra_status ra_safetensors_parse(const void *data, size_t bytes, ra_safetensors *out)
{
    *out = (ra_safetensors){0};
    uint64_t header_bytes;
    RA_TRY(check_file_bytes(bytes));
    RA_TRY(check_length(data, bytes, &header_bytes));
    const char *header = (const char *)data + LENGTH_BYTES;
    int64_t *begin = NULL;
    int64_t data_bytes = (int64_t)(bytes - LENGTH_BYTES - header_bytes);
    ra_status status = parse_header(header, (size_t)header_bytes, data_bytes, out, &begin);
    if (!status) {
        status = bind_data(header + header_bytes, begin, out);
    }
    ra_free(begin);
    if (status) {
        ra_safetensors_free(out);
    }
    return status;
}

static ra_status read_exactly(int fd, void *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, (char *)to + done, bytes - done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return RA_FAIL(RA_E_IO, "%s", strerror(errno));
        }
        if (got == 0) {
            return RA_FAIL(RA_E_IO, "file became shorter while it was read");
        }
        done += (size_t)got;
    }
    return RA_OK;
}

static ra_status read_file(int fd, ra_safetensors *out)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        return RA_FAIL(RA_E_IO, "not a regular file");
    }
    uint64_t file_bytes = (uint64_t)info.st_size, header_bytes;
    unsigned char length[LENGTH_BYTES];
    RA_TRY(check_file_bytes(file_bytes));
    RA_TRY(read_exactly(fd, length, LENGTH_BYTES));
    RA_TRY(check_length(length, file_bytes, &header_bytes));
    char *header = NULL;
    int64_t *begin = NULL;
    uint64_t data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
    ra_status status = RA_NEW(&header, header_bytes);
    if (status || (status = read_exactly(fd, header, (size_t)header_bytes)) ||
        (status = parse_header(header, (size_t)header_bytes, (int64_t)data_bytes, out, &begin)) ||
        (status = ra_alloc((size_t)data_bytes, 1, &out->data)) ||
        (status = read_exactly(fd, out->data, (size_t)data_bytes))) {
        goto done;
    }
    status = bind_data(out->data, begin, out);
done:
    ra_free(header);
    ra_free(begin);
    return status;
}

/* Without O_NONBLOCK, opening a pipe would wait for a writer. */
static int open_file(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

static ra_status read_text(int fd, char **text, size_t *bytes)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        return RA_FAIL(RA_E_IO, "not a regular file");
    }
    if (info.st_size > RA_TEXT_FILE_BYTES_MAX) {
        return RA_FAIL(RA_E_IO, "%lld bytes, expected at most %d", (long long)info.st_size,
                       RA_TEXT_FILE_BYTES_MAX);
    }
    char *read = NULL;
    RA_TRY(RA_NEW(&read, info.st_size + 1));
    ra_status status = read_exactly(fd, read, (size_t)info.st_size);
    if (status) {
        ra_free(read);
        return status;
    }
    *text = read;
    *bytes = (size_t)info.st_size;
    return RA_OK;
}

ra_status ra_text_file_read(const char *path, char **text, size_t *bytes)
{
    int fd = open_file(path);
    if (fd < 0) {
        return RA_FAIL(RA_E_IO, "%s: %s", path, strerror(errno));
    }
    ra_status status = read_text(fd, text, bytes);
    close(fd);
    return status ? RA_FAIL(status, "%s: %s", path, ra_last_error()) : RA_OK;
}

ra_status ra_safetensors_read(const char *path, ra_safetensors *out)
{
    *out = (ra_safetensors){0};
    int fd = open_file(path);
    if (fd < 0) {
        return RA_FAIL(RA_E_IO, "%s: %s", path, strerror(errno));
    }
    ra_status status = read_file(fd, out);
    close(fd);
    if (status) {
        ra_safetensors_free(out);
        return RA_FAIL(status, "%s: %s", path, ra_last_error());
    }
    return RA_OK;
}

void ra_safetensors_free(ra_safetensors *file)
{
    for (int64_t i = 0; file->copy && i < file->tensor_count; i++) {
        ra_free(file->copy[i]);
    }
    ra_free(file->copy);
    ra_free(file->tensor);
    ra_free(file->meta);
    ra_free(file->data);
    json_decref(file->header);
    *file = (ra_safetensors){0};
}

const ra_st_tensor *ra_safetensors_find(const ra_safetensors *file, const char *name)
{
    for (int64_t i = 0; i < file->tensor_count; i++) {
        if (strcmp(file->tensor[i].name, name) == 0) {
            return &file->tensor[i];
        }
    }
    return NULL;
}

const char *ra_safetensors_meta(const ra_safetensors *file, const char *key)
{
    for (int64_t i = 0; i < file->meta_count; i++) {
        if (strcmp(file->meta[i].key, key) == 0) {
            return file->meta[i].value;
        }
    }
    return NULL;
}
