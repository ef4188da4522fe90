/*
 * The writer: header and tensors go to a temporary file in the directory of the target, which is
 * synced and then renamed over it, so that no reader and no failure ever sees half a file. Must not
 * know what the tensors mean.
 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "cli/safetensors.h"

enum { HEADER_ALIGN = 8 };

static int compare_names(const void *left, const void *right)
{
    const ra_st_tensor *a = left, *b = right;
    return strcmp(a->name, b->name);
}

static json_t *describe(const ra_st_tensor *tensor, size_t begin)
{
    json_t *shape = json_array();
    for (int i = 0; i < tensor->dims; i++) {
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", ra_st_dtype_name(tensor->dtype), "shape",
                     shape, "data_offsets", (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

/* The header, padded with spaces so that the data begins aligned. NULL if memory ran out. */
static char *build_header(const ra_st_tensor *tensor, int64_t tensor_count, const ra_st_meta *meta,
                          int64_t meta_count, size_t *bytes)
{
    json_t *root = json_object(), *strings = json_object();
    bool failed = false;
    for (int64_t i = 0; i < meta_count; i++) {
        failed |= json_object_set_new(strings, meta[i].key, json_string(meta[i].value)) != 0;
    }
    failed |= json_object_set_new(root, "__metadata__", strings) != 0;
    size_t begin = 0;
    for (int64_t i = 0; i < tensor_count; i++) {
        failed |= json_object_set_new(root, tensor[i].name, describe(&tensor[i], begin)) != 0;
        begin += tensor[i].bytes;
    }
    size_t used = failed ? 0 : json_dumpb(root, NULL, 0, JSON_COMPACT);
    *bytes = (used + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
    char *text = NULL;
    if (used > 0 && ra_alloc(*bytes, 1, &text) == RA_OK) {
        memset(text, ' ', *bytes);
        json_dumpb(root, text, used, JSON_COMPACT);
    }
    json_decref(root);
    return text;
}

static ra_status write_exactly(int fd, const void *from, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t put = write(fd, (const char *)from + done, bytes - done);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0) {
            return RA_FAIL(RA_E_IO, "%s", strerror(errno));
        }
        done += (size_t)put;
    }
    return RA_OK;
}

static ra_status write_contents(int fd, const char *header, size_t header_bytes,
                                const ra_st_tensor *tensor, int64_t tensor_count)
{
    unsigned char length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)(header_bytes >> (8 * i));
    }
    RA_TRY(write_exactly(fd, length, sizeof length));
    RA_TRY(write_exactly(fd, header, header_bytes));
    for (int64_t i = 0; i < tensor_count; i++) {
        RA_TRY(write_exactly(fd, tensor[i].data, tensor[i].bytes));
    }
    /* mkstemp makes the file private; give it the mode that creat() would have. */
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, 0666 & ~mask) != 0 || fsync(fd) != 0) {
        return RA_FAIL(RA_E_IO, "%s", strerror(errno));
    }
    return RA_OK;
}

/* The rename itself lasts only once its directory is on disk. Not every file system can sync one,
 * so failure is no error. */
static void sync_directory(char *path)
{
    int fd = open(dirname(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

static ra_status write_and_rename(const char *path, const char *header, size_t header_bytes,
                                  const ra_st_tensor *tensor, int64_t tensor_count)
{
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.XXXXXX", path) < 0) {
        return RA_FAIL(RA_E_NOMEM, "%s: allocation failed", path);
    }
    int fd = mkstemp(temporary);
    ra_status status;
    if (fd < 0) {
        status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
        goto done;
    }
    status = write_contents(fd, header, header_bytes, tensor, tensor_count);
    if (close(fd) != 0 && !status) {
        status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
    }
    if (!status && rename(temporary, path) != 0) {
        status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
    }
    if (status) {
        unlink(temporary);
    } else {
        sync_directory(temporary);
    }
done:
    free(temporary);
    return status;
}

ra_status ra_safetensors_write(const char *path, const ra_st_tensor *tensor, int64_t tensor_count,
                               const ra_st_meta *meta, int64_t meta_count)
{
    ra_st_tensor *sorted = NULL;
    char *header = NULL;
    size_t header_bytes = 0;
    struct stat info;
    /* A rename would replace a device or a pipe by a file, and a link by a file; realpath keeps the
     * link. */
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        return RA_FAIL(RA_E_IO, "%s: exists and is not a regular file", path);
    }
    RA_TRY(RA_NEW(&sorted, tensor_count));
    char *target = realpath(path, NULL);
    ra_status status = RA_OK;
    if (tensor_count > 0) {
        memcpy(sorted, tensor, (size_t)tensor_count * sizeof *sorted);
        qsort(sorted, (size_t)tensor_count, sizeof *sorted, compare_names);
    }
    header = build_header(sorted, tensor_count, meta, meta_count, &header_bytes);
    if (!header) {
        status = RA_FAIL(RA_E_NOMEM, "%s: allocation failed", path);
        goto done;
    }
    status = write_and_rename(target ? target : path, header, header_bytes, sorted, tensor_count);
    if (status == RA_E_IO) {
        status = RA_FAIL(RA_E_IO, "%s: cannot write: %s", path, ra_last_error());
    }
done:
    free(target);
    ra_free(header);
    ra_free(sorted);
    return status;
}
