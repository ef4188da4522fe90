/*
 * Files as commands need them: a small one is read whole, a new one replaces the old one whole or
 * not at all. The code stands beside the two of safetensors, which read and write the same way.
 * Must not know what files hold.
 */
#ifndef RA_CLI_FILES_H
#define RA_CLI_FILES_H

#include <signal.h>

#include "base/status.h"

enum { RA_TEXT_FILE_BYTES_MAX = 64 << 20 };

/* A regular file of at most RA_TEXT_FILE_BYTES_MAX, ended by a 0 that *bytes does not count. Free
 * *text with ra_free. */
ra_status ra_text_file_read(const char *path, char **text, size_t *bytes);

/* Are these one file? Of two that do not exist yet: will they be? */
bool ra_file_is_same(const char *left, const char *right);

/* A file that is written beside its target and takes its place at the end. Until then it has no
 * name, so that whatever ends the program leaves nothing behind; where the file system cannot do
 * that, all signals wait until the end. */
typedef struct ra_aside {
    int fd;
    char *target;    /* links resolved */
    char *path;      /* opens the file, for those that want a path */
    bool named;      /* path is a name in the directory of the target */
    sigset_t before; /* the signal mask to return to, if named */
} ra_aside;

/* RA_E_IO if there is something at path that is no regular file. */
ra_status ra_aside_open(const char *path, ra_aside *out);
/* Could it be opened now? Leaves nothing behind. */
ra_status ra_aside_check(const char *path);
/* Ends it either way: `written`, the status of writing, decides and is returned if it failed. */
ra_status ra_aside_close(ra_aside *aside, ra_status written);

#endif
