/*
 * The writer: header and tensors go to a file beside the target, which is synced and then takes its
 * place, so that no reader, no failure and no signal ever leaves half a file. Must not know what
 * the tensors mean.
 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <libgen.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "cli/files.h"
#include "cli/safetensors.h"

enum {
    HEADER_ALIGN = 8,
    NAME_BYTES = 64, /* more than a path aside has beyond its target, and than one in /proc */
};

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
    return RA_OK;
}

/* "." of a path without a slash. NULL if memory ran out. */
static char *directory_of(const char *path)
{
    char *copy = strdup(path);
    char *result = copy ? strdup(dirname(copy)) : NULL;
    free(copy);
    return result;
}

bool ra_file_is_same(const char *left, const char *right)
{
    struct stat a, b;
    bool has_left = stat(left, &a) == 0, has_right = stat(right, &b) == 0;
    if (has_left || has_right) {
        return has_left && has_right && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
    }
    const char *left_name = strrchr(left, '/'), *right_name = strrchr(right, '/');
    left_name = left_name ? left_name + 1 : left;
    right_name = right_name ? right_name + 1 : right;
    char *left_in = directory_of(left), *right_in = directory_of(right);
    bool same = left_in && right_in && stat(left_in, &a) == 0 && stat(right_in, &b) == 0 &&
                a.st_dev == b.st_dev && a.st_ino == b.st_ino && strcmp(left_name, right_name) == 0;
    free(left_in);
    free(right_in);
    return same;
}

static void block_signals(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

static void free_aside(ra_aside *aside)
{
    if (aside->named) {
        pthread_sigmask(SIG_SETMASK, &aside->before, NULL);
    }
    free(aside->target);
    ra_free(aside->path);
    *aside = (ra_aside){.fd = -1};
}

/* A file with a name, for file systems without O_TMPFILE. */
static ra_status open_named(ra_aside *out)
{
    snprintf(out->path, strlen(out->target) + NAME_BYTES, "%s.XXXXXX", out->target);
    out->named = true;
    block_signals(&out->before);
    out->fd = mkostemp(out->path, O_CLOEXEC);
    if (out->fd < 0) {
        return RA_FAIL(RA_E_IO, "%s: cannot write: %s", out->target, strerror(errno));
    }
    /* mkostemp makes the file private; give it the mode that creat() would have. */
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(out->fd, 0666 & ~mask) != 0) {
        ra_status status = RA_FAIL(RA_E_IO, "%s: cannot write: %s", out->target, strerror(errno));
        close(out->fd);
        unlink(out->path);
        return status;
    }
    return RA_OK;
}

ra_status ra_aside_open(const char *path, ra_aside *out)
{
    struct stat info;
    *out = (ra_aside){.fd = -1};
    /* A rename would replace a device or a pipe by a file, and a link by a file; realpath keeps the
     * link. */
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        return RA_FAIL(RA_E_IO, "%s: exists and is not a regular file", path);
    }
    out->target = realpath(path, NULL);
    out->target = out->target ? out->target : strdup(path);
    char *directory = out->target ? directory_of(out->target) : NULL;
    ra_status status;
    if (!directory) {
        status = RA_FAIL(RA_E_NOMEM, "%s: allocation failed", path);
        goto done;
    }
    if ((status = RA_NEW(&out->path, strlen(out->target) + NAME_BYTES))) {
        goto done;
    }
    out->fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
    snprintf(out->path, NAME_BYTES, "/proc/self/fd/%d", out->fd);
    if (out->fd >= 0 && access(out->path, F_OK) != 0) { /* /proc is not mounted */
        close(out->fd);
        out->fd = -1;
    }
    if (out->fd < 0) {
        status = open_named(out);
    }
done:
    free(directory);
    if (status) {
        free_aside(out);
    }
    return status;
}

ra_status ra_aside_check(const char *path)
{
    ra_aside aside;
    RA_TRY(ra_aside_open(path, &aside));
    ra_aside_close(&aside, RA_E_IO); /* nothing has been written: it is dropped */
    return RA_OK;
}

/* Gives a file without a name the target's: at once if that is free, else by a rename. */
static ra_status link_and_rename(const ra_aside *aside)
{
    enum { TRIES = 100 };
    char *name = NULL;
    sigset_t before;
    if (linkat(AT_FDCWD, aside->path, AT_FDCWD, aside->target, AT_SYMLINK_FOLLOW) == 0) {
        return RA_OK;
    }
    if (errno != EEXIST) {
        return RA_FAIL(RA_E_IO, "%s", strerror(errno));
    }
    size_t name_bytes = strlen(aside->target) + NAME_BYTES;
    ra_status status = RA_OK;
    RA_TRY(RA_NEW(&name, name_bytes));
    block_signals(&before); /* the name in between would outlive the program */
    for (int i = 0; i < TRIES; i++) {
        snprintf(name, name_bytes, "%s.%ld.%d", aside->target, (long)getpid(), i);
        if (linkat(AT_FDCWD, aside->path, AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0) {
            break;
        }
        if (errno != EEXIST || i == TRIES - 1) {
            status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
            goto done;
        }
    }
    if (rename(name, aside->target) != 0) {
        status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
        unlink(name);
    }
done:
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    ra_free(name);
    return status;
}

static ra_status rename_named(const ra_aside *aside)
{
    if (rename(aside->path, aside->target) != 0) {
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

ra_status ra_aside_close(ra_aside *aside, ra_status written)
{
    ra_status status = written;
    if (!status && fsync(aside->fd) != 0) {
        status = RA_FAIL(RA_E_IO, "%s", strerror(errno));
    }
    if (!status) {
        status = aside->named ? rename_named(aside) : link_and_rename(aside);
    }
    if (status && aside->named) {
        unlink(aside->path);
    }
    close(aside->fd);
    if (status == RA_E_IO) {
        status = RA_FAIL(RA_E_IO, "%s: cannot write: %s", aside->target, ra_last_error());
    }
    if (!status) {
        sync_directory(aside->target);
    }
    free_aside(aside);
    return status;
}

ra_status ra_safetensors_write(const char *path, const ra_st_tensor *tensor, int64_t tensor_count,
                               const ra_st_meta *meta, int64_t meta_count)
{
    ra_st_tensor *sorted = NULL;
    size_t header_bytes = 0;
    ra_aside aside;
    RA_TRY(RA_NEW(&sorted, tensor_count));
    if (tensor_count > 0) {
        memcpy(sorted, tensor, (size_t)tensor_count * sizeof *sorted);
        qsort(sorted, (size_t)tensor_count, sizeof *sorted, compare_names);
    }
    char *header = build_header(sorted, tensor_count, meta, meta_count, &header_bytes);
    ra_status status = header ? RA_OK : RA_FAIL(RA_E_NOMEM, "%s: allocation failed", path);
    if (!status && !(status = ra_aside_open(path, &aside))) {
        status = ra_aside_close(
            &aside, write_contents(aside.fd, header, header_bytes, sorted, tensor_count));
    }
    ra_free(header);
    ra_free(sorted);
    return status;
}
